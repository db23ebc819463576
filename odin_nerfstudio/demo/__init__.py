"""A capture of our own and a tour of the tools on it: no downloads, the same pixels on every machine."""
