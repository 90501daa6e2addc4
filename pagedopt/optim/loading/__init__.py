"""Loading state dicts: translation from bitsandbytes, checks, and copying that signals do not interrupt."""
