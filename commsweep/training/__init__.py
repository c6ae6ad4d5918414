"""One Run in, one recorded row out."""
