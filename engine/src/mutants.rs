//! Mutation testing: bugs planted on purpose, which `cargo xtask mutants` switches on one at a time to see that a test fails. A mutant is a row of
//! the table in xtask/src/mutants.rs and one `mutant!("name", right, wrong)` in the code. Without the feature `mutants`, that is just `right`.

use std::borrow::Cow;

/// `right`; with the feature `mutants`, `wrong` if the environment variable KILN_MUTANT is `name`.
#[cfg(not(feature = "mutants"))]
#[macro_export]
macro_rules! mutant {
    ($name:literal, $right:expr, $wrong:expr) => {
        $right
    };
}

/// `wrong` if the environment variable KILN_MUTANT is `name`, else `right`.
#[cfg(feature = "mutants")]
#[macro_export]
macro_rules! mutant {
    ($name:literal, $right:expr, $wrong:expr) => {
        if $crate::mutants::is($name) { $wrong } else { $right }
    };
}

/// A kernel's source; with the feature `mutants`, perhaps with a bug in it.
#[cfg(not(feature = "mutants"))]
pub(crate) fn kernel(source: &str) -> Cow<'_, str> {
    source.into()
}

#[cfg(feature = "mutants")]
pub use planted::is;
#[cfg(feature = "mutants")]
pub(crate) use planted::kernel;

#[cfg(feature = "mutants")]
mod planted {
    use super::Cow;
    use std::sync::OnceLock;

    /// Whether this mutant is switched on. The engine reads no other environment variable, and this one in no other build.
    pub fn is(name: &str) -> bool {
        static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
        CHOSEN.get_or_init(|| std::env::var("KILN_MUTANT").ok()).as_deref() == Some(name)
    }

    /// A mutant in CUDA source, by text replacement: `right` occurs once in all kernels together.
    struct InKernel {
        name: &'static str,
        right: &'static str,
        wrong: &'static str,
    }

    const IN_KERNELS: &[InKernel] = &[
        InKernel { name: "cuda-attention-without-scale", right: "shown ? SCALE * s[a][c] :", wrong: "shown ? s[a][c] :" },
        InKernel { name: "cuda-layer-norm-without-mean", right: "(v[i] - mean) * r;", wrong: "v[i] * r;" },
        InKernel {
            name: "cuda-loss-without-weight",
            right: "loss_of(target, picked, lse) * weight",
            wrong: "loss_of(target, picked, lse)",
        },
        InKernel { name: "cuda-expert-of-a-tie", right: "whose < who)", wrong: "whose > who)" },
        InKernel {
            name: "cuda-sum-of-a-row-too-many",
            right: "row >= offsets[0] && row < offsets[EXPERTS]",
            wrong: "row >= offsets[0] && row <= offsets[EXPERTS]",
        },
        InKernel { name: "cuda-gradient-of-a-row-too-many", right: "(int)i < offsets[EXPERTS]", wrong: "(int)i <= offsets[EXPERTS]" },
        InKernel { name: "cuda-fp8-history-ignored", right: "larger(most, i == oldest ? now : history[i])", wrong: "larger(most, now)" },
        InKernel {
            name: "cuda-fp8-oldest-counts",
            right: "larger(most, i == oldest ? now : history[i])",
            wrong: "larger(most, history[i])",
        },
        InKernel { name: "cuda-fp8-scale-of-zeros", right: "if (most == 0.0f) return;", wrong: "" },
        InKernel { name: "cuda-adamw-second-moment-not-corrected", right: "bias[1]};", wrong: "1.0f};" },
    ];

    pub fn kernel(source: &str) -> Cow<'_, str> {
        match IN_KERNELS.iter().find(|m| is(m.name) && source.contains(m.right)) {
            Some(m) => source.replace(m.right, m.wrong).into(),
            None => source.into(),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::path::Path;

        fn kernels(folder: &Path) -> Vec<String> {
            let of = |path: &Path| match path.extension() {
                None => kernels(path),
                Some(e) if e == "cu" || e == "cuh" => vec![std::fs::read_to_string(path).unwrap()],
                Some(_) => vec![],
            };
            std::fs::read_dir(folder).unwrap().flat_map(|entry| of(&entry.unwrap().path())).collect()
        }

        #[test]
        fn kernels_hold_what_is_replaced_in_them_once() {
            let all = kernels(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
            for m in IN_KERNELS {
                assert_eq!(all.iter().map(|text| text.matches(m.right).count()).sum::<usize>(), 1, "{}: {:?}", m.name, m.right);
            }
        }
    }
}
