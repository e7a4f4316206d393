"""What both ends of a connection share: messages, addresses, announcements."""
