"""The command `xlstm7b`, also as `python -m xlstm7b`."""

import signal
import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it at any time, without a traceback; a shell reports 130.

    While the command line is imported, and while Python exits, the signal just ends the process.
    """
    # The background jobs of a shell ignore the signal.
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from xlstm7b.cli import main as run

    try:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
