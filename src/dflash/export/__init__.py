"""Drafters out and in: the formats that engines and other trainers read, and what must be refused on the way."""
