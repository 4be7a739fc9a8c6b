"""Decide which documents to remove, and change the text of others: language, rules for quality, the user's filters."""
