"""The command line: options in, text or JSON out.

The only room with argparse and a progress bar. It has no logic that a Python caller would miss.
"""
