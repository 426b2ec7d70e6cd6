"""The command `xlstm7b`, also as `python -m xlstm7b`."""

import signal
import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it at any time with exit code 130, without a traceback."""
    try:
        from xlstm7b.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # While Python exits, which may take a moment, another Ctrl-C just ends the process.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a shell's background job has that
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
