//! hrm from the command line: runs that resume, answers segment by segment, Sudokus from files.

use crate::common::*;
use crate::hrm::*;
use engine::Meta;
use kiln::data::Split;
use kiln::data::puzzles::{Mazes, PuzzleSet, Size, Sudokus, Task as Puzzle};
use kiln::recipe;
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn kiln_train(out: &Path, more: &str) -> Ran {
    let sets: Vec<&str> = LITTLE.iter().flat_map(|s| ["--set", s]).collect();
    let start = ["train", "hrm", "--threads", "1", "--out", out.to_str().unwrap()];
    kiln([&start[..], &sets, &more.split_whitespace().collect::<Vec<_>>()].concat())
}

#[test]
fn stopped_and_resumed_is_never_having_stopped() {
    let dir = tempdir().unwrap();
    let (whole, halves) = (dir.path().join("whole"), dir.path().join("halves"));
    let said = kiln_train(&whole, "--steps 30").ok();
    for part in ["13 to validate with", "examples/s", "exact_halted", "course.svg", "experts.svg"] {
        assert!(said.out.contains(part), "{part} in {said:#?}");
    }
    kiln_train(&halves, "--steps 11").ok();
    resume(&halves, "--steps 30").ok();
    same_bytes(&checkpoint(&whole, 30), &checkpoint(&halves, 30));
    let state = fs::read(checkpoint(&whole, 30).join("state.safetensors")).unwrap();
    let state = String::from_utf8_lossy(&state);
    assert!(state.contains("carry.high") && state.contains("carry.minimum") && !state.contains("scratch"), "the carry is kept");

    let last = records(&whole, "train").pop().unwrap();
    for key in ["ce", "halting", "balance", "exact", "cell", "segments", "load.2", "grad_norm", "val_exact", "val_exact_halted"] {
        assert!(last[key].is_number(), "{key} in {last}");
    }
    let loads: f64 = (0..3).map(|i| last[format!("load.{i}")].as_f64().unwrap()).sum();
    assert!((loads - 1.0).abs() < 1e-5, "{last}");

    // A checkpoint is evaluated as the run was.
    let said = kiln(["eval", &text(&whole), "--json", "--threads", "1"]).ok();
    let value: Value = serde_json::from_str(&said.out).unwrap();
    all_declared(&value);
    for name in ["exact", "exact_halted", "cell", "segments", "halting_accuracy"] {
        assert_eq!(value[name], last[format!("val_{name}")], "{name}");
    }
}

#[test]
fn answers_are_shown_segment_by_segment() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    kiln_train(&run, "--steps 20").ok();
    let run = text(&run);
    let json = |args: &[&str]| -> Value {
        let all = [&["solve", &run, "--threads", "1", "--json"][..], args].concat();
        serde_json::from_str(&kiln(all).ok().out).unwrap()
    };

    // The first of the unseen puzzles, as text and as JSON.
    let said = kiln(["solve", &run, "--count", "2", "--threads", "1"]).ok();
    let value = json(&["--count", "2"]);
    let puzzles = value["puzzles"].as_array().unwrap();
    assert_eq!(puzzles.len(), 2);
    for puzzle in puzzles {
        let segments = puzzle["segments"].as_array().unwrap();
        let (solution, last) = (puzzle["solution"].as_str().unwrap(), segments.last().unwrap());
        let wrong = solution.chars().zip(last["answer"].as_str().unwrap().chars()).filter(|(a, b)| a != b).count() as u64;
        assert!(last["wrong"] == wrong && segments.len() == 4 && wrong > 0, "{puzzle}");
        // Each wrong cell has its mark in front of it.
        assert!(said.out.contains(&format!("after 4 segments, the limit: {wrong} cells are wrong")), "{said:#?}");
    }
    let marks: u64 = puzzles.iter().map(|p| p["segments"][3]["wrong"].as_u64().unwrap()).sum();
    assert_eq!(said.out.lines().filter(|l| !l.contains("puzzle")).map(|l| l.matches('x').count() as u64).sum::<u64>(), marks);
    assert!(said.out.contains("what changed") && said.out.contains("sudoku-4x4"), "{said:#?}");

    // Puzzles of one's own: a text, a file, one with two solutions.
    let file = dir.path().join("mine.txt");
    fs::write(&file, "12 34\n34 12\n\n21 .0\n43 21\n").unwrap();
    let value = json(&["1234 3412 21.. 4321", &text(&file), "1... .... .... ...."]);
    let puzzles = value["puzzles"].as_array().unwrap();
    assert_eq!(puzzles[0], puzzles[1]);
    assert_eq!(puzzles[0]["solution"], "1234341221434321");
    assert!(puzzles[2]["solution"].is_null() && puzzles[2]["segments"][0]["wrong"].is_null());
    assert!(kiln(["solve", &run, "1... .... .... ....", "--threads", "1"]).ok().out.contains("no solution, or more than one"));

    kiln(["solve", &run, "1234"]).fails(&["4 cells", "sudoku-4x4 has 16"]);
    kiln(["solve", &run, "1234 3412 21.. 4325"]).fails(&["'5' is no cell", ".1234"]);
    kiln(["solve", &run, "_234 3412 21.. 4321"]).fails(&["'_' is no cell"]);
    kiln(["predict", &run, "a.png"]).fails(&["hrm", "does not classify pictures", "vision_bdh", "kiln solve"]);
    kiln(["generate", &run]).fails(&["does not write text"]);
    let hydra = dir.path().join("hydra");
    train(&hydra, "--steps 1").ok();
    kiln(["solve", &text(&hydra)]).fails(&["hydra", "does not solve puzzles", "recipes that do: hrm"]);
}

#[test]
fn mazes_are_learned_and_solved_too() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    let sizes = "--set task=maze --set side=6 --set seq=37 --set hardness=6 --set experts=0 --set max_segments=2";
    kiln_train(&run, &format!("--steps 5 {sizes}")).ok();
    let said = kiln(["solve", &text(&run), "--count", "1", "--to-limit", "--threads", "1"]).ok();
    assert!(said.out.contains("maze-6x6") && said.out.contains("after 2 segments"), "{said:#?}");
    let task = Puzzle::Maze(6);
    let set = Mazes { side: 6, steps: 6 }.generate(3, Split::Val, 5).unwrap();
    for i in 0..5 {
        let (puzzle, solution) = set.item(i);
        assert_eq!(task.solution(puzzle).as_deref(), Some(solution));
        assert_eq!(task.parse(&task.show(puzzle)).as_deref(), Ok(puzzle));
        assert!(task.parse(&task.show(solution)).unwrap_err().contains("'o' is no cell"));
        let marked = task.marked(puzzle, solution);
        assert_eq!(marked.matches('x').count(), solution.iter().filter(|&&token| token == 5).count());
    }
    // Two ways of the same length, a wall all around, two goals.
    for maze in ["S..G", "S#.G", "SG.G"].map(|row| [row, "....", "....", "...."].concat()) {
        assert_eq!(Puzzle::Maze(4).solution(&Puzzle::Maze(4).parse(&maze).unwrap()).is_some(), maze.starts_with("S..G"), "{maze}");
    }
}

fn csv(set: &PuzzleSet, from: usize, to: usize) -> String {
    let line = |tokens: &[u8]| tokens.iter().map(|t| (t - 1).to_string()).collect::<String>();
    (from..to).map(|i| format!("{},{}\n", line(set.item(i).0), line(set.item(i).1))).collect()
}

#[test]
fn sudokus_are_read_from_files() {
    let dir = tempdir().unwrap();
    let four = Sudokus { size: Size::Four, clues: None, guesses: 0 };
    let [learn, test] = Split::ALL.map(|split| four.generate(5, split, 20).unwrap());
    let write = |name: &str, text: &str| {
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        fs::write(dir.path().join(name), text).unwrap();
        format!("data.path={}", dir.path().join(name).display())
    };
    let task = |sets: &[&str]| hrm().task(&config(sets)).map(|_| ()).map_err(|e| e.to_string());

    // One file is split by class, whatever the order of its lines.
    let all = write("all.csv", &format!("puzzle,solution\n{}{}", csv(&test, 0, 20), csv(&learn, 0, 20)));
    let c = config(&[&all, "train_puzzles=0", "test_puzzles=0"]);
    let solver = hrm().solves().unwrap().solver(&c).unwrap();
    assert_eq!(solver.unseen(100).unwrap(), test);
    assert_eq!(hrm().solves().unwrap().solver(&config(&[&all, "test_puzzles=6"])).unwrap().unseen(100).unwrap().len(), 6);
    let (mut t, mut s) = loaded(&c);
    t.begin(0).unwrap();
    t.step(&mut s, 0, 1e-3).unwrap();
    t.evaluate(&mut s).unwrap();
    let identity = t.identity().unwrap();
    assert!(identity["data"].is_string() && hrm().task(&config(&[])).unwrap().identity().unwrap()["data"].is_null());
    let fewer = write("fewer.csv", &format!("{}{}", csv(&test, 0, 20), csv(&learn, 1, 20)));
    assert_ne!(hrm().task(&config(&[&fewer])).unwrap().identity().unwrap(), identity);

    // A folder says itself what is what.
    write("both/train.csv", &csv(&test, 0, 20));
    write("both/test.csv", &csv(&learn, 0, 3));
    let both = format!("data.path={}", dir.path().join("both").display());
    assert_eq!(hrm().solves().unwrap().solver(&config(&[&both])).unwrap().unseen(100).unwrap(), learn.chosen(|i| i < 3));

    // Either set may change alone, and a run that goes on sees it.
    let run = dir.path().join("run");
    kiln_train(&run, &format!("--steps 1 --set {both}")).ok();
    for (name, other, what) in
        [("both/test.csv", csv(&learn, 0, 4), "the validation data"), ("both/train.csv", csv(&test, 1, 20), "the data")]
    {
        let before = fs::read_to_string(dir.path().join(name)).unwrap();
        write(name, &other);
        resume(&run, "--steps 2").fails(&[what, "was"]);
        write(name, &before);
    }
    resume(&run, "--steps 2").ok();

    // Puzzles of one side alone: what is never learned can be evaluated.
    let one = write("one.csv", &csv(&test, 0, 20));
    let error = hrm().task(&config(&[&one])).unwrap().begin(0).unwrap_err().to_string();
    assert!(error.contains("one.csv") && error.contains("none of these is to learn from"), "{error}");
    let other = write("other.csv", &csv(&learn, 0, 20));
    assert!(task(&[&other]).unwrap_err().contains("none of these is to validate with"));
    assert!(task(&[&all, "side=9", "seq=82", "vocab=11"]).unwrap_err().contains("holds sudoku-4x4"));
    assert!(task(&[&all, "task=maze", "side=5", "seq=26"]).unwrap_err().contains("mazes are generated"));
    assert!(task(&["data.path=/nowhere.csv"]).unwrap_err().contains("/nowhere.csv"));
    let broken = write("broken.csv", "1234341221434321,1234341221434322\n");
    assert!(task(&[&broken]).unwrap_err().contains("line 1"));
}

#[test]
fn an_evaluation_says_what_of_a_file_it_left_out() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    kiln_train(&run, "--steps 1").ok();
    let four = Sudokus { size: Size::Four, clues: None, guesses: 0 };
    let [learn, test] = Split::ALL.map(|split| four.generate(5, split, 20).unwrap());
    let [both, unseen] = ["both.csv", "unseen.csv"].map(|name| text(&dir.path().join(name)));
    fs::write(&both, csv(&test, 0, 20) + &csv(&learn, 0, 9)).unwrap();
    fs::write(&unseen, csv(&test, 0, 11)).unwrap();
    let eval = |more: &[&str]| kiln([&["eval", &text(&run), "--threads", "1"][..], more].concat()).ok().out;
    // The run's data.test_puzzles is 13, its batch 5.
    let cases: [(&[&str], &str, [u64; 4]); 4] = [
        (&[], "13 puzzles evaluated, none left out", [13, 0, 0, 0]),
        (&["--data", &unseen], "11 puzzles evaluated, none left out", [11, 0, 0, 0]),
        (&["--data", &both], "13 puzzles evaluated, 16 left out: 9 of the training side, 7 beyond data.test_puzzles\n", [13, 9, 7, 0]),
        (&["--data", &unseen, "--batches", "2"], "10 puzzles evaluated, 1 left out: 1 beyond train.eval_batches\n", [10, 0, 0, 1]),
    ];
    for (more, line, [evaluated, training_side, test_puzzles, eval_batches]) in cases {
        let said = eval(more);
        assert!(said.contains(line), "{more:?}: {said}");
        let value: Value = serde_json::from_str(&eval(&[more, &["--json"]].concat())).unwrap();
        let left_out = serde_json::json!({ "training_side": training_side, "test_puzzles": test_puzzles, "eval_batches": eval_batches });
        let expected = serde_json::json!({ "what": "puzzles", "evaluated": evaluated, "left_out": left_out });
        assert_eq!(value["counted"], expected, "{more:?}");
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let cases: [(&[&str], &str); 22] = [
        (&["heads=3"], "a whole, even number"),
        (&["dim=6"], "a whole, even number"),
        (&["heads=0"], "model.heads = 0: from 1 to"),
        (&["top_k=4"], "model.top_k = 4: from 1 to model.experts = 3"),
        (&["top_k=0"], "model.top_k = 0"),
        (&["batch=1048576", "experts=200", "top_k=200"], "1048576 x 17 x 200: experts have fewer than 2^31 rows"),
        (&["experts=2000"], "model.experts = 2000: from 0 to 1024"),
        (&["max_segments=0"], "model.max_segments = 0"),
        (&["low_cycles=0"], "model.low_cycles = 0"),
        (&["explore=1.5"], "model.explore = 1.5"),
        (&["halt_weight=nan"], "model.halt_weight"),
        (&["norm_eps=0.0"], "model.norm_eps = 0.0: from 1e-30 to 1.0"),
        (&["seq=16"], "use --set model.seq=17"),
        (&["seq=17", "prefix=3"], "use --set model.seq=19"),
        (&["vocab=5"], "sudoku-4x4 has 6 tokens"),
        (&["vocab=300"], "a token is a byte"),
        (&["side=5"], "4 or 9 cells a side"),
        (&["task=maze", "side=4"], "5 to 128 cells a side"),
        (&["task=chess"], "chess"),
        (&["train_puzzles=0"], "data.train_puzzles = 0"),
        (&["train_puzzles=67108865"], "data.train_puzzles = 67108865: from 1 to 67108864 of sudoku-4x4"),
        (&["task=maze", "side=128", "seq=16385", "test_puzzles=65537"], "data.test_puzzles = 65537: from 1 to 65536 of maze-128x128"),
    ];
    for (sets, part) in cases {
        let error = hrm().task(&config(sets)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(part), "{sets:?}: {error}");
    }
    // What cannot be generated is said when it is asked for.
    for (sets, need) in
        [(&["hardness=900"][..], "ask for fewer guesses)"), (&["hardness=900", "task=maze", "side=5", "seq=26"], "so long a path")]
    {
        let error = hrm().task(&config(sets)).unwrap().begin(0).unwrap_err().to_string();
        assert!(error.starts_with("data.hardness = 900: none of") && error.contains(need), "{sets:?}: {error}");
    }
    // Dense whatever top_k says.
    loaded(&config(&["experts=1", "top_k=7"]));
}

#[test]
fn the_presets_are_what_they_say() {
    let parameters = |name: &str| {
        let c = recipe::preset(hrm(), Some(name)).unwrap();
        let task = hrm().task(&c).unwrap();
        let graphs = task.graphs();
        graphs[0].1.states().filter(|(s, _)| s.role == engine::Role::Param).map(|(_, m): (_, &Meta)| m.elements()).sum::<usize>() as f64
            / 1e6
    };
    assert!((parameters("sudoku") - 27.3).abs() < 0.1, "{}", parameters("sudoku"));
    assert!((parameters("sudoku-moe") - 83.9).abs() < 0.5, "{}", parameters("sudoku-moe"));
    parameters("tiny");
    parameters("maze");
}
