"""The lighthouse of torchft, which its agents ask who is there: `lighthouse.py --bind [::]:PORT ...`.

A file of our own, since the library takes its arguments from those of the process, behind the name of a script.
"""

from torchft._torchft import lighthouse_main  # pyrefly: ignore - in a folder of its own, see docs/chaos.md

if __name__ == "__main__":
    lighthouse_main()
