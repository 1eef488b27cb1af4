//! `tokenizer.ggml.model` = `gpt2`: byte-level byte-pair merges.

use std::collections::HashMap;

use tokenizers::{
    AddedToken,
    models::bpe::{BPE, Vocab},
};
use zofo_hal::{Error, Result};

use super::{BOS, EOS, Engine, Kind, MERGES, Made, Metadata, PRE, UNKNOWN, Vocabulary, brief, pre};
use crate::files::tokenizer::huggingface::HuggingFace;

pub(super) fn make(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Made> {
    let named = metadata.text(PRE)?;
    let pre = pre::find(named)?;
    let ids = &vocabulary.ids;
    let merges = metadata.texts(MERGES)?.ok_or_else(|| Error::format(format!("`{MERGES}` is missing")))?;
    let pairs = merges.iter().enumerate().map(|(at, merge)| pair(ids, at, merge)).collect::<Result<Vec<_>>>()?;
    let failed = |e: tokenizers::Error| Error::format(format!("the tokenizer cannot be put together ({e}); fetch the file again"));
    let vocab: Vocab = ids.iter().map(|(text, id)| ((*text).to_owned(), *id)).collect();
    let model = BPE::builder().vocab_and_merges(vocab, pairs).ignore_merges(pre.ignore_merges).build().map_err(failed)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    pre.install(&mut inner).map_err(failed)?;
    let added = vocabulary.tokens.iter().enumerate().filter_map(|(id, text)| {
        let special = match vocabulary.kind(id) {
            Kind::Control | Kind::Unknown => true,
            Kind::UserDefined => false,
            Kind::Normal | Kind::Unused | Kind::Byte => return None,
        };
        Some(AddedToken::from(text.as_str(), special).normalized(false))
    });
    inner.add_tokens(added).map_err(failed)?;
    vocabulary.id(metadata, UNKNOWN)?;
    let unnamed = if named.is_none() { " (the file names none)" } else { "" };
    let description = format!("byte-pair, pre-tokenizer {}{unnamed}, {} tokens, {} merges", pre.name(), ids.len(), merges.len());
    Ok(Made {
        engine: Engine::HuggingFace(Box::new(HuggingFace::assemble(inner, None)?)),
        bos: vocabulary.id(metadata, BOS)?,
        eos: vocabulary.id(metadata, EOS)?,
        adds_bos: pre.adds_bos,
        description,
    })
}

/// The two tokens of a merge, checked to make a third: the crate that runs the merges takes that for granted.
fn pair(ids: &HashMap<&str, u32>, at: usize, merge: &str) -> Result<(String, String)> {
    let known = |text: &str| ids.contains_key(text);
    match merge.split_once(' ') {
        Some((a, b)) if known(a) && known(b) && known(&format!("{a}{b}")) => Ok((a.to_owned(), b.to_owned())),
        _ => Err(Error::format(format!("`{MERGES}`: merge {at} `{}` does not make a token from two tokens", brief(merge)))),
    }
}
