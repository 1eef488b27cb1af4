//! A `tokenizer.json`, and text through it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zofo_ops::files::Tokenizer;

fuzz_target!(|data: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_tokenizer_json(data) else { return };
    let Ok(ids) = tokenizer.encode("Once upon a time, 1234 \u{e9}\u{1F600}\n", true) else { return };
    let _ = tokenizer.decode(&ids);
});
