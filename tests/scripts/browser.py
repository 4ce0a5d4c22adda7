"""Opens pages in headless Chromium. A test that imports this skips itself (77) where Chromium is not installed."""
import shutil
import subprocess
import sys
import tempfile

chromium = shutil.which("chromium")
if not chromium:
    print("Chromium is not installed (Debian's package chromium)")
    sys.exit(77)


def opened(address, width, dark, *more):
    """What Chromium writes to stdout, such as the page after its scripts with --dump-dom. Fails if the console says
    something."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run([chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                               "--enable-logging=stderr", f"--window-size={width},2400", "--virtual-time-budget=4000",
                               "--hide-scrollbars", scheme, *more, address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, "\n".join(said)
    return done.stdout
