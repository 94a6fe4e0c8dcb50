"""Experiments: what is measured about a cache, against FullKV and against the article's own figures."""
