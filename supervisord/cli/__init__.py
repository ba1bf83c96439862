"""vllmctl: the command line. The parser, the actions and the reporting of errors are apart."""
