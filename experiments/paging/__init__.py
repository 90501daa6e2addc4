"""Parts of the experiment ``paged_state``, one module each, and what they share."""
