//! `kiln check golden`: files pass, altered ones fail by name, and bad ones are refused.

use crate::common::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs::{self};
use std::path::Path;
use tempfile::tempdir;

/// The golden file with every tensor as `change` leaves it.
fn golden_with(to: &Path, change: impl Fn(&str, &mut Vec<u8>), note: impl Fn(&mut HashMap<String, String>)) {
    let bytes = fs::read(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let mut data = view.data().to_vec();
            change(name, &mut data);
            (name.to_string(), view.dtype(), view.shape().to_vec(), data)
        })
        .collect();
    let mut notes = header.metadata().clone().unwrap();
    note(&mut notes);
    let views = all.iter().map(|(n, dtype, shape, data)| (n, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, Some(notes), to).unwrap();
}

#[test]
fn golden_files_pass_and_altered_ones_fail_by_name() {
    let dir = tempdir().unwrap();
    let ours = dir.path().join("ours.safetensors");
    kiln(["check", "golden", GOLDEN, "--write", &text(&ours)]).ok();
    let (theirs, written) = (fs::read(GOLDEN).unwrap(), fs::read(&ours).unwrap());
    let (theirs, written) = (SafeTensors::deserialize(&theirs).unwrap(), SafeTensors::deserialize(&written).unwrap());
    let computed = |n: &&str| !n.starts_with("param/") && !n.starts_with("input/");
    for name in theirs.names().into_iter().filter(computed) {
        let (a, b) = (theirs.tensor(name).unwrap(), written.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")));
        assert_eq!(a.shape(), b.shape(), "{name}");
    }

    let altered = dir.path().join("altered.safetensors");
    let mut unnoticed = vec![];
    // A large tensor, small ones, single numbers, and one whose gradient is tiny.
    for wrong in ["output/hidden", "grad/blocks.0.attn.temperature", "loss", "after/embedding", "metric/grad_norm", "grad/blocks.1.router"]
    {
        let one_percent = |name: &str, data: &mut Vec<u8>| {
            for b in data.chunks_exact_mut(4).filter(|_| name == wrong) {
                b.copy_from_slice(&(f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * 1.01).to_le_bytes());
            }
        };
        golden_with(&altered, one_percent, |_| {});
        let ran = kiln(["check", "golden", &text(&altered)]);
        let failed: Vec<&str> = ran.out.lines().filter_map(|l| l.strip_prefix("FAIL")?.trim().split(": ").next()).collect();
        if ran.code != Some(1) || failed != [wrong] {
            unnoticed.push(format!("{wrong}: exit {:?}, failed: {failed:?}", ran.code));
        }
        kiln(["check", "golden", &text(&altered), "--tolerance", "0.02"]).ok();
    }
    assert!(unnoticed.is_empty(), "altered by 1%: {unnoticed:?}");
    golden_with(
        &altered,
        |name, data| {
            if name == "loss" {
                data[0] ^= 0xff;
                data[2] ^= 0x10
            }
        },
        |_| {},
    );
    // The first file's failure is not forgotten over the second's success.
    assert_eq!(kiln(["check", "golden", &text(&altered), GOLDEN]).code, Some(1));
}

#[test]
fn bad_golden_files_are_refused() {
    let dir = tempdir().unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.safetensors"));
    let check = |name: &str, parts: &[&str]| case(format!("check golden {}", path(name).display()), parts);
    fs::write(path("empty"), "").unwrap();
    fs::write(path("text"), "a golden file that is only text, and long enough to be a header").unwrap();
    let bytes = fs::read(GOLDEN).unwrap();
    fs::write(path("cut"), &bytes[..bytes.len() - 4]).unwrap();
    let note = |name: &str, key: &'static str, value: &'static str| {
        golden_with(&path(name), |_, _| {}, |notes| drop(notes.insert(key.into(), value.into())));
    };
    note("recipe", "recipe", "hidra");
    note("steps", "steps", "three");
    note("many", "steps", "-1");
    note("json", "config", "{");
    note("optimizer", "optimizer", "{}");
    note("config", "config", "{\"vocab\": 256}");
    let config = |name: &str, from: &'static str, to: &'static str| {
        golden_with(
            &path(name),
            |_, _| {},
            |notes| {
                let changed = notes["config"].replace(from, to);
                assert_ne!(changed, notes["config"]);
                notes.insert("config".into(), changed);
            },
        );
    };
    config("divide", "\"dim\": 64", "\"dim\": 65");
    config("wider", "\"dim\": 64", "\"dim\": 128");
    config("deeper", "\"blocks\": 3", "\"blocks\": 4");
    config("vocab", "\"vocab\": 256", "\"vocab\": 20");
    golden_with(
        &path("ids"),
        |n, d| {
            if n == "input/ids" {
                d[..8].copy_from_slice(&(1i64 << 32).to_le_bytes())
            }
        },
        |_| {},
    );
    golden_with(
        &path("masked"),
        |n, d| {
            if n == "input/targets" {
                d.fill(0xff)
            }
        },
        |_| {},
    );
    all_refused(vec![
        check("nowhere", &["nowhere.safetensors", "No such file"]),
        check("empty", &["empty.safetensors"]),
        check("text", &["text.safetensors"]),
        check("cut", &["cut.safetensors", "not a whole safetensors file"]),
        check("recipe", &["'hidra'", "'hydra'"]),
        check("steps", &["steps.safetensors", "'steps'"]),
        check("many", &["many.safetensors", "'steps'"]),
        check("json", &["json.safetensors", "'config'"]),
        check("optimizer", &["optimizer.safetensors", "lr"]),
        check("config", &["config.safetensors", "dim"]),
        check("divide", &["divide.safetensors", "65"]),
        check("wider", &["wider.safetensors", "its config makes it"]),
        check("deeper", &["deeper.safetensors", "blocks.3"]),
        check("vocab", &["vocab.safetensors", "do not fit"]),
        check("ids", &["ids.safetensors", "whole numbers"]),
        check("masked", &["masked.safetensors", "all masked"]),
        case("check golden", &["FILES"]),
        case(format!("check golden {GOLDEN} --tolerance -1"), &["-1"]),
        case(format!("check golden {GOLDEN} --tolerance nan"), &["--tolerance"]),
        case(format!("check golden {GOLDEN} {GOLDEN} --write {}", path("out").display()), &["--write"]),
        case(format!("check golden {GOLDEN} --pass recomput=auto"), &["recomput", "'recompute'"]),
        case("check ops nothing", &["'nothing'"]),
    ]);
    assert!(!path("out").exists());
}
