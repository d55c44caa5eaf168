"""Entry of the zipapp. Any Python from 2.7 on must be able to read this file, in order to say that it is too old."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,str-format"

# Nothing else may be imported up here: a minimal Python lacks even json.
import os
import sys

CANNOT_RUN = 120
TERMINATION_LOG = "/dev/termination-log"


def _report_cannot_run(why):
    message = "the agent cannot run in this image: " + why
    sys.stderr.write("everstep: " + message + "\n")
    sys.stderr.flush()
    if sys.argv[1:2] == ["run"] and "--local" not in sys.argv:
        try:
            with open(TERMINATION_LOG, "w") as log:  # noqa: PTH123 - pathlib is younger than what may read this
                word = '{"result": "unusable", "exitCode": %d, "message": "%s"}'
                log.write(word % (CANNOT_RUN, _escape_json(message)))
        except (IOError, OSError):  # noqa: UP024 - two classes in Python 2
            pass
    sys.exit(CANNOT_RUN)


def _escape_json(text):
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(letter if " " <= letter <= "~" else " " for letter in text)


def _prefer_byte_code():
    """Import modules that are compiled for this Python already, if the archive has them: much of a start is compiling.
    Other versions of Python take the sources."""
    try:
        from _frozen_importlib_external import MAGIC_NUMBER  # importlib.util would import ten modules more
    except ImportError:
        return
    sys.path.insert(0, sys.path[0] + os.sep + MAGIC_NUMBER.hex())


def _import_main():
    """Import the agent without ssl: asyncio does without where there is none, no agent uses it, and it is as long to
    import as Python takes to start."""
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        from everstep.agent.main import main
    finally:
        del sys.modules["ssl"]
    return main


def _start_agent():
    version = "Python %d.%d.%d (%s)" % (tuple(sys.version_info[:3]) + (sys.executable,))  # noqa: UP031, RUF005
    if sys.version_info < (3, 9):  # noqa: UP036
        _report_cannot_run(version + " is too old, it needs 3.9 or newer")
    try:
        import signal

        # PID 1 has no default handlers: until the agent sets its own, a TERM would be lost.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
        _prefer_byte_code()
        main = _import_main()
    except (ImportError, SyntaxError) as error:
        _report_cannot_run("%s: %s" % (version, error))  # noqa: UP031
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _start_agent()
