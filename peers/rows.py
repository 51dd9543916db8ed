"""The rows of bench/rows.toml, and the sides that are timed for each: processes that stay loaded and answer `time SECONDS` with a line of JSON.

bench/rows.toml says what a row has; the code of a side, and kiln's plan of it, are a number each, so that a figure is known to be of what is here.
"""
import ast, functools, hashlib, json, os, shlex, subprocess, threading, tomllib
import serve

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def read(path=os.path.join(ROOT, "bench", "rows.toml")):
    """Row by name, in the file's order."""
    with open(path, "rb") as f:
        return {row["name"]: row for row in tomllib.load(f)["row"]}


def program(mode):
    """The opponent that a mode is of: the expert's code, what people have today, a scan alone, the usual decoder, or the usual step of any other recipe."""
    kind = mode.split("+")[0].split("-")[0]
    return dict(tuned="tuned", transformers="today.py", torchao="today.py", scan="ssd.py", usual="decoder.py").get(kind, "bench.py")


def opponent(row, mode):
    """Starts it."""
    return serve.Row(os.path.join(HERE, program(mode)), row.get("peer", row["name"]), mode.removeprefix("tuned-"))


class Kiln(serve.Child):
    """kiln's own side: `kiln bench ROW --serve`."""

    def __init__(self, binary, row, device, extra):
        log = f"/tmp/peer-{os.getpid()}-{row['name']}-{os.path.basename(binary)}-{hashlib.sha256(binary.encode()).hexdigest()[:8]}.log"
        super().__init__([binary, "bench", *shlex.split(row["kiln"]), "--device", device, *extra, "--serve"], log, dict(recipe=row["name"], mode="kiln"))


class NoPlan(Exception):
    """kiln does not plan a row."""


@functools.cache
def fingerprint(binary, args, extra):
    """What kiln runs for a row, as one number."""
    done = subprocess.run([binary, "bench", *shlex.split(args), *extra, "--fingerprint"], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoPlan(done.stderr.strip() or f"{binary} bench --fingerprint: exit code {done.returncode}")
    return done.stdout.strip()


def sources(path, seen=None):
    """A Python file of this folder, and those of this repository that it imports."""
    seen = {} if seen is None else seen
    if path in seen or not os.path.exists(path):
        return seen
    with open(path) as f:
        seen[path] = f.read()
    folders = [os.path.dirname(path), HERE, os.path.join(HERE, "tuned"), os.path.join(ROOT, "reference")]
    for node in ast.walk(ast.parse(seen[path])):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            for folder in folders:
                sources(os.path.join(folder, name.split(".")[0] + ".py"), seen)
    return seen


def code(row, mode):
    """What an opponent of a row runs, as one number: the mode, and the text of its files."""
    text = sources(os.path.join(HERE, row["file"] or "tuned/__main__.py" if program(mode) == "tuned" else program(mode)))
    return hashlib.sha256("\n".join([mode, *(text[path] for path in sorted(text))]).encode()).hexdigest()[:16]


class Card:
    """The clock and the power of the card while something runs, from nvidia-smi, where there is one."""

    def __init__(self):
        self.lines, self.lock = [], threading.Lock()
        command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
            self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            self.process = None
            return
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        for line in self.process.stdout:
            try:
                reading = [float(v) for v in line.split(",")]
            except ValueError:
                continue
            with self.lock:
                self.lines.append(reading)

    def since(self):
        """Means of what was read since the last call."""
        with self.lock:
            lines, self.lines = self.lines, []
        mean = lambda i: round(sum(l[i] for l in lines) / len(lines))
        return dict(mhz=mean(0), watts=mean(1)) if lines else {}

    @staticmethod
    def name():
        try:
            said = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
            return said.stdout.strip().splitlines()[0] if said.returncode == 0 else None
        except (OSError, IndexError):
            return None

    def end(self):
        if self.process:
            self.process.kill()
