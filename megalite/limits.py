"""Limits that flags of training and of the data tools share."""

INT32_LARGEST, INT64_LARGEST = 2**31 - 1, 2**63 - 1
MOST_SPECIAL_TOKENS = 1_000_000  # of a tiktoken JSON vocabulary; a name is made up for each
