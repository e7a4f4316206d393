"""The messages, addresses and announcements that both ends of a connection use."""
