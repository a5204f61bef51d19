"""torchft's lighthouse, at which its agents find each other: `lighthouse.py --bind [::]:PORT ...`.

It is our own program, since the library reads the arguments of the process after a script's name.
"""

from torchft._torchft import lighthouse_main  # pyrefly: ignore - see docs/how-to/inject-faults.md

if __name__ == "__main__":
    lighthouse_main()
