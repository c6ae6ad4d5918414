"""What is remembered between messages: of boundaries, of gradients; and where it lies."""
