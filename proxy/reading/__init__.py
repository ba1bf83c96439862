"""What requests and answers say that the port must know, read where it stands in their bytes and never rewritten."""
