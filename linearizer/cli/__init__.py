"""The command line: options in, text or JSON out.

The only room with argparse and a progress bar; it holds no logic that Python callers would miss.
"""
