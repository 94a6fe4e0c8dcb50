"""Speed, measured: every figure a ratio between things timed alternately in one process.

Wall-clock medians with their spread; absolute times are printed beside them and mean little on a
shared machine. Nothing here decides anything: the product's own code runs on random or real tokens.
"""
