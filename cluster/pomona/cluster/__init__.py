"""Head, gateway and command line: everything that decides for the whole cluster."""
