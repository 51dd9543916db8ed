"""compare.py and table.py with a kiln and opponents that only say times: python3 -m unittest compare_test, in this folder. A test of the train crate runs it."""
import csv, json, os, shutil, subprocess, sys, tempfile, textwrap, unittest

HERE = os.path.dirname(os.path.abspath(__file__))

# A side: notes what it is asked for, and answers with the times that FOLDER/NAME.ms has, one after another.
SIDE = '''
import json, os, signal, sys, time
folder = os.environ["FAKE"]
def note(name, what):
    with open(os.path.join(folder, "log"), "a") as f:
        f.write(f"{name} {what}\\n")
def text(name, other):
    path = os.path.join(folder, name)
    return open(path).read() if os.path.exists(path) else other
def side(name):
    note(name, "starts")
    if text(name + ".hangs", ""):
        time.sleep(1000)
    if text(name + ".fails", ""):
        sys.exit("it does not run here")
    time.sleep(0.05)
    note(name, "is ready")
    print(json.dumps(dict(setup_s=1.5)), flush=True)
    times = [float(ms) for ms in text(name + ".ms", "10").split()]
    turn = 0
    for line in sys.stdin:
        note(name, line.strip())
        if line.startswith("attention"):
            print(json.dumps(dict(attention="none")), flush=True)
            continue
        ms = times[turn // 2 % len(times)]   # the first of two is the warm-up
        turn += 1
        if turn == int(text(name + ".kills", "0")):
            os.kill(int(text("pid", "")), signal.SIGKILL)
            sys.exit()
        print(json.dumps(dict(ms=ms, per_s=1000 / ms, unit="steps", peak_gib=2.0)), flush=True)
'''
KILN = f"#!{sys.executable}\n" + SIDE + '''
if "--fingerprint" in sys.argv:
    print(text("plan", "11"))
else:
    side(os.path.basename(sys.argv[0]))
'''
PEER = SIDE + '''
side(sys.argv[sys.argv.index("--modes") + 1] + "-" + os.path.basename(os.path.dirname(os.path.abspath(__file__))))
'''
ROWS = '''
[[row]]
name = "a"
kiln = "decoder --set layers=1"
is = "8 tokens"
usual = ["compile", "graphs"]
expert = ["tuned-graphs"]
file = "tuned/__main__.py"
unit = "tok/s"

[[row]]
name = "b"
kiln = "hydra"
is = "a step"
usual = ["compile"]
expert = []
file = ""
unit = "ms"
'''
CUT = '{"row": "a", "mo\n'   # of a call that was killed while it wrote
# compare.py with the opponents of a folder.
DRIVER = '''
import os, sys
sys.path.insert(0, sys.argv[1])
import rows
rows.HERE = os.path.join(os.environ["FAKE"], "peers")
with open(os.path.join(os.environ["FAKE"], "pid"), "w") as f:
    f.write(str(os.getpid()))
sys.argv = ["compare.py", *sys.argv[2:]]
import compare
compare.main()
'''


class Compare(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        for name in ("kiln", "older"):
            self.write(name, KILN)
            os.chmod(self.at(name), 0o755)
        self.write("peers/bench.py", PEER)
        self.write("peers/tuned/__main__.py", PEER)
        self.write("rows.toml", ROWS)
        self.write("driver.py", textwrap.dedent(DRIVER))

    def at(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.at(name)), exist_ok=True)
        with open(self.at(name), "w") as f:
            f.write(text)

    def log(self):
        """What sides were asked for since the last call."""
        if not os.path.exists(self.at("log")):
            return []
        with open(self.at("log")) as f:
            lines = f.read().splitlines()
        os.remove(self.at("log"))
        return lines

    def command(self):
        own = ["--table", self.at("rows.toml"), "--kiln", self.at("kiln"), "--device", "cpu", "--seconds", "0.2", "--warm-up", "0.1", "--file", self.at("measured.jsonl")]
        return [sys.executable, self.at("driver.py"), HERE, *own]

    def env(self):
        return dict(os.environ, FAKE=self.folder, KILN_COMMIT="abc")

    def compare(self, *args, expects=0):
        done = subprocess.run([*self.command(), *args], env=self.env(), capture_output=True, text=True)
        self.assertEqual(done.returncode, expects, done.stdout + done.stderr)
        return done.stdout

    def records(self):
        with open(self.at("measured.jsonl")) as f:
            return {(r["row"], r["mode"]): r for r in (json.loads(line) for line in f if line != CUT)}

    def figures(self, *args, **kw):
        self.compare(*args, "--json", self.at("out.json"), **kw)
        with open(self.at("out.json")) as f:
            return json.load(f)

    def test_turns_of_five_seconds_after_five_that_do_not_count(self):
        script = "import sys; sys.path.insert(0, sys.argv.pop(1)); import compare; a = compare.arguments()[0]; print(a.warm_up, a.seconds, a.rounds)"
        done = subprocess.run([sys.executable, "-c", script, HERE, "--table", self.at("rows.toml")], capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), ["5", "5", "3"], done.stderr)

    def test_sides_are_set_up_one_after_another_and_take_turns_in_an_order_that_rotates(self):
        self.compare("a")
        log = self.log()
        names = ["kiln", "compile-peers", "graphs-peers", "graphs-tuned"]
        self.assertEqual(log[:8], [f"{name} {what}" for name in names for what in ("starts", "is ready")])
        turn = lambda name: [f"{name} time 0.1", f"{name} time 0.2"]
        orders = [names[r:] + names[:r] for r in range(3)]
        self.assertEqual(log[8:-3], [line for order in orders for name in order for line in turn(name)])
        self.assertEqual(log[-3:], [f"{name} attention" for name in names[1:]])

    def test_the_ratio_is_the_median_of_the_rounds_and_the_fastest_mode_counts(self):
        self.write("kiln.ms", "10 20 10")
        self.write("compile-peers.ms", "20 80 30")   # 2, 4, 3
        self.write("graphs-peers.ms", "50")
        self.write("graphs-tuned.ms", "11 20 9")
        a = self.figures("a")["a"]
        self.assertEqual((a["usual"]["mode"], a["usual"]["ratio"]), ("compile", dict(median=3.0, low=2.0, high=4.0)))
        self.assertEqual(a["expert"]["ratio"], dict(median=1.0, low=0.9, high=1.1))
        self.assertEqual((a["kiln"]["ms"], a["usual"]["ms"], a["usual"]["gib"]), (10, 30, 2.0))

    def test_a_build_that_is_slower_fails(self):
        older = ("--against", self.at("older"))
        self.write("kiln.ms", "10.3 10.4 10.2")
        said = self.compare(*older, expects=1)
        self.assertIn("FAILED, a: 3.0% slower (2.0% to 4.0%)", said)
        self.assertNotIn("compile", "".join(self.log()))
        self.assertIn("a: measured already", self.compare(*older, expects=1))
        self.assertEqual(self.log(), [])
        for ms in ("10", "9", "10.05", "9.9 10.4 10.4"):   # as fast, faster, slower by less than 1%, not slower in every round
            os.remove(self.at("measured.jsonl"))
            self.write("kiln.ms", ms)
            self.compare(*older)
        self.write("older.fails", "yes")
        os.remove(self.at("measured.jsonl"))
        self.assertIn("FAILED, a: not compared: it does not run here", self.compare(*older, expects=1))

    def test_a_call_that_was_killed_goes_on_where_it_ended(self):
        self.write("compile-peers.kills", "4")   # in the second round of the first row
        self.compare(expects=-9)
        before = self.records()
        self.assertEqual([len(r["turns"]) for r in before.values()], [1, 1, 1])
        with open(self.at("measured.jsonl"), "a") as f:
            f.write(CUT.strip())
        os.remove(self.at("compile-peers.kills"))
        self.log()
        self.compare()
        log, after = self.log(), self.records()
        self.assertEqual(log[log.index("graphs-tuned is ready") + 1], "compile-peers time 0.1")   # the order of the second round
        self.assertEqual([len(r["turns"]) for r in after.values()], [3, 3, 3, 3])
        for key, rec in before.items():
            self.assertEqual(after[key]["turns"][:1], rec["turns"])
        self.compare()
        self.assertEqual(self.log(), [])

    def test_sides_are_measured_again_where_they_or_the_plan_have_changed(self):
        self.compare()
        self.log()
        self.write("peers/tuned/__main__.py", PEER + "# another\n")
        self.compare()
        self.assertEqual([line for line in self.log() if "starts" in line], ["kiln starts", "graphs-tuned starts"])
        self.write("plan", "12")
        self.compare("b")
        self.assertEqual([line for line in self.log() if "starts" in line], ["kiln starts", "compile-peers starts"])

    def test_what_hangs_or_fails_is_noted_and_costs_no_other_figure(self):
        self.write("compile-peers.hangs", "yes")
        self.write("graphs-peers.fails", "yes")
        a = self.figures("a", "--patience", "1")["a"]
        self.assertEqual(a["usual"], {})
        self.assertIn("ratio", a["expert"])
        errors = {mode: r["error"] for (_, mode), r in self.records().items() if "error" in r}
        self.assertEqual(errors, dict(compile="no answer within 1 s", graphs="it does not run here"))
        self.log()
        self.compare("a", "--patience", "1")
        self.assertEqual(self.log(), [])
        os.remove(self.at("graphs-peers.fails"))
        os.remove(self.at("compile-peers.hangs"))
        self.compare("a", "--retry")
        self.assertEqual([line for line in self.log() if "starts" in line], ["kiln starts", "compile-peers starts", "graphs-peers starts"])
        self.write("plan", "12")
        self.write("kiln.fails", "yes")
        self.assertIn("FAILED, a: it does not run here", self.compare("a", expects=1))

    def test_a_part_ends_in_time_and_the_next_goes_on(self):
        turns, calls = 0, 0
        while turns < 12:
            done = subprocess.run([*self.command(), "--minutes", "0.01"], env=self.env(), capture_output=True, text=True)
            before, turns, calls = turns, sum(len(r["turns"]) for r in self.records().values()), calls + 1
            self.assertGreater(turns, before, done.stdout + done.stderr)
            self.assertEqual((done.returncode, "not yet: " in done.stdout), (3, True) if turns < 12 else (0, False), done.stdout)
        self.assertGreater(calls, 3)
        self.assertEqual({key: len(r["turns"]) for key, r in self.records().items()}, {("a", "compile"): 3, ("a", "graphs"): 3, ("a", "tuned-graphs"): 3, ("b", "compile"): 3})

    def test_kiln_alone(self):
        self.compare("--alone")
        self.assertEqual({line.split()[0] for line in self.log()}, {"kiln"})
        self.assertEqual([(key, len(r["turns"])) for key, r in self.records().items()], [(("a", "alone"), 3), (("b", "alone"), 3)])

    def table(self, *args, expects=0):
        script = "import sys; sys.path.insert(0, sys.argv.pop(1)); import os, rows; rows.HERE = os.path.join(os.environ['FAKE'], 'peers'); import table; table.main()"
        own = ["--table", self.at("rows.toml"), "--results", self.at("results.csv"), "--readme", self.at("README.md"), "--kiln", self.at("kiln"), "--ledgers", self.at("ledger")]
        done = subprocess.run([sys.executable, "-c", script, HERE, *own, *args], env=dict(os.environ, FAKE=self.folder), capture_output=True, text=True)
        self.assertEqual(done.returncode, expects, done.stdout + done.stderr)
        return done.stdout

    def test_results_have_every_side_and_say_of_which_code_they_are(self):
        with open(os.path.join(HERE, "..", "bench", "results.csv")) as f:
            self.write("results.csv", f.readline())
        self.write("compile-peers.ms", "20 30 40")
        self.compare("a", "b")
        self.compare("a:autotune")
        self.compare("b", "--alone")
        self.write("kiln.ms", "9")
        self.compare("a", "--against", self.at("older"))
        for _ in range(2):   # once is as often as twice
            self.table(self.at("measured.jsonl"), "--machine", "X")
        with open(self.at("results.csv"), newline="") as f:
            found = {(x["what"], x["opponent"]): x for x in csv.DictReader(f)}
        self.assertEqual(len(found), 6)
        for (_, who), x in found.items():
            self.assertEqual((x["commit"], x["machine"]), ("abc", "X"), who)
        usual = found["b: a step, ms", "usual"]
        self.assertEqual([usual[k] for k in ("kiln", "peer", "ratio", "low", "high", "fingerprint")], ["10", "30", "3.00", "2.00", "4.00", "11"])
        self.assertEqual(found["a: 8 tokens, tok/s", "older build"]["ratio"], "1.11")
        self.assertIn(("a: 8 tokens, tok/s", "autotune"), found)
        self.assertEqual(found["b: a step, ms", "alone"]["peer"], "")
        # README's table shows them as current.
        readme = "| a | 8 tokens | 100 tok/s | 100 (1.00x) | 100 (1.00x) | 2, 2, 2 | abc |\n| b | a step | 10 ms | 30 (3.00x) | - | 2, 2, - | abc |\n"
        self.write("README.md", readme)
        self.write("ledger/a.json", '{"turns": {"loads": 0.01}}')
        self.table("--check", "--strict")
        self.write("ledger/b.json", '{"turns": {"rounds": 3}}')
        self.assertIn("b.json: its intervals leave out how loads differ", self.table("--check", "--strict", expects=1))
        os.remove(self.at("ledger/b.json"))
        self.write("plan", "12")
        self.assertEqual(self.table("--check", expects=1).count("shown as current, and measured at an earlier commit"), 3)
        self.write("README.md", readme.replace("x) |", "x) \\* |"))
        self.table("--check")
        self.assertIn("a, usual: measured at an earlier commit", self.table("--check", "--strict", expects=1))
        self.write("plan", "11")
        self.write("peers/tuned/__main__.py", PEER + "# another\n")
        self.assertEqual(self.table("--check", "--strict", expects=1).strip(), "a, expert: its opponent's code has changed since")

    def script(self, name, *args, expects=0):
        """A script of bench/ in a copy of the checkout, with turns that are short."""
        if not os.path.exists(self.at("copy")):
            for folder, ending in (("peers", ".py"), ("bench", ".sh")):
                os.makedirs(self.at("copy/" + folder))
                for file in (f for f in os.listdir(os.path.join(HERE, "..", folder)) if f.endswith(ending)):
                    shutil.copy(os.path.join(HERE, "..", folder, file), self.at(f"copy/{folder}/{file}"))
            os.makedirs(self.at("copy/bench/ledger"))
            with open(os.path.join(HERE, "..", "bench", "results.csv")) as f:
                self.write("copy/bench/results.csv", f.readline())
            for file in ("peers/bench.py", "peers/tuned/__main__.py"):
                self.write("copy/" + file, PEER)
            self.write("copy/bench/rows.toml", ROWS)
            self.write("copy/README.md", "| a | 8 tokens | - | - | - | - | - |\n| b | a step | - | - | - | - | - |\n")
            self.write("python", f'#!/bin/sh\ncase $1 in */compare.py) exec {sys.executable} "$@" --seconds 0.1 --warm-up 0.05 ;; *) exec {sys.executable} "$@" ;; esac\n')
            os.chmod(self.at("python"), 0o755)
        env = dict(self.env(), KILN=self.at("kiln"), PYTHON=self.at("python"), DEVICE="cpu", MACHINE="X", ROWS="" if name == "all.sh" else "a:autotune b:tuned-autotune")
        done = subprocess.run([self.at("copy/bench/" + name), *args], env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, expects, done.stdout + done.stderr)
        with open(self.at("copy/bench/results.csv"), newline="") as f:
            return done.stdout, {(x["what"], x["opponent"]): x for x in csv.DictReader(f)}

    def test_the_gate_from_end_to_end(self):
        self.write("kiln.ms", "11")
        said, found = self.script("all.sh", "--against", self.at("older"), expects=1)
        self.assertEqual(said.count("10.0% slower"), 2, said)   # and the figures are there
        self.assertEqual(found["b: a step, ms", "older build"]["ratio"], "0.91")
        self.write("kiln.ms", "10")
        said, found = self.script("all.sh")
        self.assertEqual({who for _, who in found}, {"older build", "usual", "expert"})
        said, found = self.script("all.sh")
        self.assertEqual((said.count("measured already"), len(found)), (2, 5), said)
        self.write("plan", "12")   # where the peers do not run, the gate says what is missing
        self.write("copy/peers/tuned/__main__.py", "import no_such_thing\n")
        said, _ = self.script("all.sh", expects=1)
        self.assertIn("a, expert: measured at an earlier commit", said)

    def test_max_autotune_is_a_part_and_a_line_a_row(self):
        self.script("autotune.sh", expects=3)
        self.script("autotune.sh", expects=3)
        _, found = self.script("autotune.sh")
        self.assertEqual(list(found), [("a: 8 tokens, tok/s", "autotune"), ("b: a step, ms", "tuned-autotune")])


if __name__ == "__main__":
    unittest.main()
