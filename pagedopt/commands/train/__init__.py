"""The main job: train a small GPT with PagedAdamW and, beside it, with torch's AdamW."""
