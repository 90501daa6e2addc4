"""Where rule, format, table, transport and kernel meet: the only place that launches."""
