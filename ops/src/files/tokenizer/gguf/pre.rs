//! Pre-tokenizers: how a text is split into words before bytes are merged within each.
//!
//! A file names its pre-tokenizer; the patterns are those of the families' own `tokenizer.json`.

use tokenizers::{
    Result as CrateResult, SplitDelimiterBehavior, Tokenizer,
    normalizers::NFC,
    pre_tokenizers::{
        PreTokenizerWrapper,
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};
use zofo_hal::{Error, Result};

/// GPT-2: English contractions, then runs of letters, of digits and of other signs, each with the space before it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Llama 3: a word takes any one sign before it, at most three digits stand together, line breaks end a run of signs.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen2: the same, but every digit stands alone.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";

/// How a family splits text.
pub(super) struct Pre {
    /// Spellings in files; the first is the usual one.
    names: &'static [&'static str],
    /// Patterns whose matches become words of their own, one applied to what the one before it made.
    splits: &'static [&'static str],
    /// Composes characters first, as the family's `tokenizer.json` does.
    nfc: bool,
    /// A word that is a token is not merged together.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with the first token where the file says nothing.
    pub(super) adds_bos: bool,
}

static KINDS: [Pre; 5] = [
    Pre { names: &["llama-bpe", "llama3", "llama-v3"], splits: &[LLAMA3], nfc: false, ignore_merges: true, adds_bos: true },
    Pre { names: &["smollm"], splits: &[DIGIT, GPT2], nfc: false, ignore_merges: false, adds_bos: false },
    Pre { names: &["qwen2"], splits: &[QWEN2], nfc: true, ignore_merges: false, adds_bos: false },
    Pre { names: &["gpt-2"], splits: &[GPT2], nfc: false, ignore_merges: false, adds_bos: false },
    // What llama.cpp does for files from before pre-tokenizers were named.
    Pre {
        names: &[DEFAULT],
        splits: &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        nfc: false,
        ignore_merges: false,
        adds_bos: false,
    },
];

const DEFAULT: &str = "default";

/// The pre-tokenizer of that name, or the default where the file names none.
pub(super) fn find(named: Option<&str>) -> Result<&'static Pre> {
    let name = named.unwrap_or(DEFAULT);
    KINDS.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
        let known = KINDS.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ");
        Error::unsupported(format!(
            "`{}` is `{}`, a pre-tokenizer that is not supported; there are {known}",
            super::PRE,
            super::brief(name)
        ))
    })
}

impl Pre {
    /// The usual name.
    pub(super) fn name(&self) -> &'static str {
        self.names[0]
    }

    /// Makes `tokenizer` split text this way, and put bytes together again when it decodes.
    pub(super) fn install(&self, tokenizer: &mut Tokenizer) -> CrateResult<()> {
        if self.nfc {
            tokenizer.with_normalizer(Some(NFC))?;
        }
        let mut steps = Vec::new();
        for pattern in self.splits {
            let split = Split::new(SplitPattern::Regex((*pattern).into()), SplitDelimiterBehavior::Isolated, false)?;
            steps.push(PreTokenizerWrapper::from(split));
        }
        let bytes = ByteLevel::new(false, true, false);
        steps.push(bytes.into());
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
        tokenizer.with_decoder(Some(bytes));
        Ok(())
    }
}
