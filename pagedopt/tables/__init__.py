"""The pointer table: its words, and addresses kept true."""
