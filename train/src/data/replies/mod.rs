//! Prompts with replies: to each prompt one or several. Replies are learned, prompts are not.
//!
//! | file | is |
//! |---|---|
//! | `template.rs` | how a prompt and a reply become one text |
//! | `rows.rs` | examples in windows of fixed length: several in a row, kept apart, or one and padding |
//! | `wording.rs` | the same for conversations, by that or by a model's own chat template |
//! | `files.rs` | files of conversations: the layouts of `data::chats` |
//! | `quiz.rs` | generated questions, each with many right answers |
//! | `questions.rs` | the quiz as tokens, without end |

mod files;
mod questions;
mod quiz;
mod rows;
mod template;
mod wording;

pub use files::{Counts, FIELDS, Files, Read};
pub(super) use files::{check_share, validates};
pub use questions::Questions;
pub use quiz::{Question, Quiz};
pub use rows::{Example, Rows, TooLong, row};
pub use template::{Template, named_turns, usual_turns};
pub use wording::{Learned, Wording, Words};

/// A prompt as a model is given it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub text: String,
    /// With what the template puts around it.
    pub tokens: Vec<u32>,
}

/// Prompts that are asked at once: each at the end of a row of `time`, so that all replies begin at the same place.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub prompts: Vec<Prompt>,
    pub time: usize,
    /// [prompts, time]; 0 where nothing is.
    pub ids: Vec<i32>,
    pub real: Vec<bool>,
}

impl Asked {
    pub fn new(prompts: Vec<Prompt>, time: usize) -> Asked {
        let (mut ids, mut real) = (vec![], vec![]);
        for prompt in &prompts {
            let n = prompt.tokens.len();
            assert!(n <= time, "a prompt of {n} tokens in a row of {time}");
            ids.extend(std::iter::repeat_n(0, time - n).chain(prompt.tokens.iter().map(|&t| t as i32)));
            real.extend((0..time).map(|t| t >= time - n));
        }
        Asked { prompts, time, ids, real }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_end_where_replies_begin() {
        let prompt = |tokens: &[u32]| Prompt { text: String::new(), tokens: tokens.to_vec() };
        let asked = Asked::new(vec![prompt(&[7, 8]), prompt(&[9, 10, 11])], 3);
        assert_eq!((asked.ids, asked.real), (vec![0, 7, 8, 9, 10, 11], vec![false, true, true, true, true, true]));
    }
}
