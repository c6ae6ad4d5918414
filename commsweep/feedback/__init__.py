"""The memories between messages: of boundaries, of gradients; and where it lies."""
