"""``python -m fedprompt.compare FOLDER ...``: see :mod:`fedprompt.compare.command`."""

from fedprompt.compare.command import main

if __name__ == "__main__":  # not in a worker process, which imports this file
    main()
