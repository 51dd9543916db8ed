//! Text with learned parts as tokens with a mask.

use super::super::{DataError, Tokenizer};
use super::Rendered;

#[derive(Debug, Clone, PartialEq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// Of each token, whether it is learned.
    pub learned: Vec<bool>,
}

/// No token is added: the text has its own beginning. A token is learned where its first byte is in a learned part: one that begins in a header
/// and reaches into the assistant's text is nothing that the model would write.
pub fn encode(tokenizer: &Tokenizer, rendered: &Rendered) -> Result<Encoded, DataError> {
    let tokens = tokenizer.encode_places(&rendered.text)?;
    let (mut learned, mut parts, mut last_end) = (Vec::with_capacity(tokens.len()), rendered.learned.iter().peekable(), 0);
    for (_, (begin, end)) in &tokens {
        // Some tokenizers leave white space out of offsets: it belongs to the token that follows the last one's end.
        let begin = (*begin).min(last_end);
        last_end = last_end.max(*end);
        while parts.next_if(|part| part.end <= begin).is_some() {}
        learned.push(parts.peek().is_some_and(|part| part.start <= begin));
    }
    Ok(Encoded { ids: tokens.into_iter().map(|(id, _)| id).collect(), learned })
}
