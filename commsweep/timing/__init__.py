"""Step times: predicted from measurements, and measured on shaped links."""
