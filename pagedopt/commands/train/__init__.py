"""``python -m pagedopt train``: train a small GPT with PagedAdamW and, beside it, with torch's AdamW."""
