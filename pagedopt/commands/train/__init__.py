"""``python -m pagedopt train``: train a small GPT with torch's optimizer, with ours, and with ours on a budget."""
