use super::*;
use crate::recipes::RECIPES;
use std::fs;

fn run(dir: &Path, name: &str, lines: &str) -> Found {
    let path = dir.join(name);
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("config.toml"), "recipe = \"own\"\npreset = \"p\"\n[train]\nsteps = 10\nbest_metric = \"\"\n").unwrap();
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
    Found { name: name.into(), path, root: dir.into() }
}

#[test]
fn figures_follow_a_file_that_grows_is_repeated_and_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let line = |step: u64, loss: f64| format!("{{\"step\":{step},\"loss\":{loss},\"val_loss\":{loss}}}\n");
    let found = run(dir.path(), "a", &format!("{}{}{{\"step\":3,\"lo", line(1, 5.0), line(2, 3.0)));
    let path = found.path.join("metrics.jsonl");
    let mut figures = Figures::default();
    let best = |figures: &mut Figures| {
        let s = summary(&found, figures, RECIPES);
        (s.step, s.best.map(|b| (b.step, b.value)))
    };
    assert_eq!(best(&mut figures), (2, Some((2, 3.0))), "a line that is cut does not count yet");
    // Resumed at step 1: the record of step 2 is replaced, a loss that is not finite is none, and damage is passed over.
    fs::write(&path, format!("{}{}{}{{\"step\":3,\"val_loss\":null}}\n\0\0\n{{}}\n", line(1, 5.0), line(2, 3.0), line(2, 4.0))).unwrap();
    assert_eq!(best(&mut figures), (3, Some((2, 4.0))));
    assert_eq!(
        (figures.bytes(), figures.unread(), figures.shown(&[]).into_iter().collect::<Vec<_>>()),
        (fs::metadata(&path).unwrap().len(), 2, vec!["loss", "val_loss"])
    );
    fs::write(&path, line(1, 7.0)).unwrap();
    assert_eq!(best(&mut figures), (1, Some((1, 7.0))), "shorter than before: another run's");
    fs::remove_file(&path).unwrap();
    let s = summary(&found, &mut Figures::default(), RECIPES);
    assert_eq!((s.step, s.problem, s.recipe.as_str(), s.steps), (0, None, "own", Some(10)));
    fs::write(found.path.join("config.toml"), "recipe = ").unwrap();
    fs::write(&path, "").unwrap();
    assert!(summary(&found, &mut Figures::default(), RECIPES).problem.is_some_and(|p| p.contains("config.toml")));
}

/// Gigabytes of zeros take no room on a disk: of a line that does not end only the beginning is read.
#[test]
fn lines_without_end_are_not_read_to_their_end() {
    let dir = tempfile::tempdir().unwrap();
    fs::File::create(dir.path().join("metrics.jsonl")).unwrap().set_len(200 << 20).unwrap();
    let mut figures = figures::Figures::default();
    figures.read_on(&crate::inside::Inside::open(dir.path(), Path::new("")).unwrap()).unwrap();
    assert_eq!(figures.bytes(), 16 << 20);
    assert!(figures.is_cut(200 << 20) && !figures.is_cut(16 << 20));
}

#[test]
fn what_cannot_be_read_is_said_and_a_speed_is_no_single_records() {
    let dir = tempfile::tempdir().unwrap();
    let speeds = [5.0, 100.0, 101.0, 99.0, 1.0];
    let lines: Vec<String> = speeds.iter().enumerate().map(|(i, s)| format!("{{\"step\":{},\"per_second\":{s}}}\n", i + 1)).collect();
    let found = run(dir.path(), "a", &lines.concat());
    let now = || summary(&found, &mut Figures::default(), RECIPES);
    assert_eq!((now().per_second, now().problem), (Some(99.0), None));
    // Only the last records count.
    let many = format!("{}{}", lines.concat(), "{\"step\":9,\"per_second\":7.0}\n".repeat(9));
    fs::write(found.path.join("metrics.jsonl"), many).unwrap();
    assert_eq!(now().per_second, Some(7.0));
    fs::write(found.path.join("metrics.jsonl"), format!("no\n{}[1]\n\n{{\"step\":6,", lines.concat())).unwrap();
    fs::write(found.path.join(NOTE), "{\"status\":").unwrap();
    let problem = now().problem.unwrap();
    assert!(problem.contains("metrics.jsonl: 2 lines cannot be read") && problem.contains("run.json cannot be read"), "{problem}");
}

#[test]
fn the_best_is_the_first_of_equals_by_the_metric_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let lines = [(1, 2.0, 0.5), (2, 1.0, 0.7), (3, 1.0, 0.9)]
        .map(|(step, loss, accuracy)| format!("{{\"step\":{step},\"val_loss\":{loss},\"val_accuracy\":{accuracy}}}\n"));
    let found = run(dir.path(), "a", &lines.concat());
    let mut figures = Figures::default();
    figures.read_on(&found.folder().unwrap()).unwrap();
    let metrics = &[
        Metric::LOSS,
        Metric::new("accuracy", recipe::Unit::Share, Better::Higher, "right"),
        Metric::new("size", recipe::Unit::None, Better::Neither, "of it"),
    ];
    let by = |wanted: &str| best(&figures, metrics, wanted).map(|b| (b.step, b.value, b.shown));
    assert_eq!(by(""), Some((2, 1.0, "1.0000".into())));
    assert_eq!(by("accuracy"), Some((3, 0.9, "90.00%".into())));
    assert_eq!((by("size"), by("other")), (None, None));
}

#[test]
fn runs_are_found_where_they_are_sorted_into_folders() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b", "a/x", "a/deep/er", "a/deep/er/still/lower", ".hidden/run"] {
        run(dir.path(), name, "");
    }
    fs::create_dir(dir.path().join("empty")).unwrap();
    // Links that lead back, and to a run that is there already.
    std::os::unix::fs::symlink(dir.path(), dir.path().join("a/back")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("a/x"), dir.path().join("latest")).unwrap();
    let names: Vec<String> = find(dir.path()).unwrap().into_iter().map(|f| f.name).collect();
    assert_eq!(names, ["a/deep/er", "a/x", "b"]);
    assert_eq!(find(&dir.path().join("b")).unwrap()[0].name, "b", "a run is the only one of itself");
    assert!(find(&dir.path().join("no")).is_err());
}

/// A run that went back may reach a step without evaluating there: what was found before is of weights that are gone.
#[test]
fn an_evaluation_of_a_step_that_was_repeated_without_one_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"step\":1,\"val_loss\":3.0}\n{\"step\":2,\"val_loss\":1.0}\n{\"step\":2,\"loss\":5.0}\n";
    let s = summary(&run(dir.path(), "a", lines), &mut Figures::default(), RECIPES);
    assert_eq!((s.step, s.best.map(|b| (b.step, b.value))), (2, Some((1, 3.0))));
}
