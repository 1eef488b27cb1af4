//! Text from a model, token by token.

use std::ops::ControlFlow;

use zofo_hal::{Error, Result};

use crate::{
    inference::Inference,
    model::Model,
    shuffle::{Purpose, Stream},
};

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GenerateSpec {
    /// Tokens to make at most.
    pub max_tokens: usize,
    /// 0 takes the likeliest token; above, tokens are drawn with probabilities proportional to exp(logit / temperature).
    pub temperature: f64,
    /// Decides the draws.
    pub seed: u64,
    /// Tokens that end the text, beside the model's own.
    pub stops: Vec<u32>,
}

impl Default for GenerateSpec {
    fn default() -> Self {
        Self { max_tokens: 64, temperature: 0.0, seed: 0, stops: Vec::new() }
    }
}

impl GenerateSpec {
    /// At most `tokens` tokens.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Ends at these tokens too: [`Tokenizer::turn_ends`](zofo_ops::files::Tokenizer::turn_ends) for a conversation.
    pub fn stops(mut self, tokens: &[u32]) -> Self {
        self.stops.extend(tokens);
        self
    }

    /// Draws at this temperature.
    pub fn temperature(mut self, temperature: f64, seed: u64) -> Self {
        (self.temperature, self.seed) = (temperature, seed);
        self
    }
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// The model ended the text.
    End,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The model's context is full.
    Context,
    /// The listener asked for it.
    Listener,
}

impl Stop {
    /// The name shown to people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::End => "end of text",
            Self::MaxTokens => "max tokens",
            Self::Context => "context full",
            Self::Listener => "stopped",
        }
    }
}

/// What was generated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Generated {
    /// The text behind the prompt.
    pub text: String,
    /// Its tokens, without the one that ends a text.
    pub ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Why it ended.
    pub stop: Stop,
}

/// Continues `prompt`. `listener` hears each piece of text as soon as it is certain, and may stop the work.
///
/// # Errors
/// `InvalidArgument` for a temperature below 0, or a prompt without tokens or that leaves no room in the context `inference` was loaded for.
pub fn generate(
    inference: &mut Inference,
    model: &Model,
    prompt: &str,
    spec: &GenerateSpec,
    listener: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Generated> {
    let ids = model.tokenizer().encode(prompt, true)?;
    generate_from(inference, model, &ids, spec, listener)
}

/// The same behind tokens, of a [conversation](crate::chat::prompt) for example. Errors are those of [`generate`].
pub fn generate_from(
    inference: &mut Inference,
    model: &Model,
    ids: &[u32],
    spec: &GenerateSpec,
    listener: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Generated> {
    if !(spec.temperature >= 0.0 && spec.temperature.is_finite()) {
        return Err(Error::invalid(format!("temperature {} must be 0 or above, and finite", spec.temperature)));
    }
    if ids.is_empty() {
        return Err(Error::invalid("the prompt has no token, and this model has none that begins a text; give some text"));
    }
    let context = inference.slice.spec().positions;
    if ids.len() > context {
        return Err(Error::invalid(format!("the prompt has {} tokens, but there is room for {context}; shorten it", ids.len())));
    }
    let mut out = Generated { text: String::new(), ids: Vec::new(), prompt_tokens: ids.len(), stop: Stop::MaxTokens };
    if spec.max_tokens == 0 {
        return Ok(out);
    }
    let capacity = context.min(ids.len().saturating_add(spec.max_tokens));
    let mut cache = inference.cache(capacity)?;
    let mut draws = Stream::new(spec.seed, Purpose::Token, 0);
    // The prompt goes through the decoder too: whether a word's space is shown depends on what stands before it.
    let mut stream = model.tokenizer().stream();
    for id in ids {
        stream.push(*id)?;
    }
    let ends = |id: u32| spec.stops.contains(&id) || model.config().eos.contains(&id) || model.tokenizer().eos() == Some(id);
    let mut next = inference.next_logits(&mut cache, ids)?;
    let mut stopped = false;
    loop {
        if next.iter().any(|logit| logit.is_nan()) {
            model.check_finite()?;
            return Err(Error::execution("the model's scores are not numbers; compute in f32, or use another adapter"));
        }
        let id = choose(&next, spec.temperature, &mut draws) as u32;
        if ends(id) {
            out.stop = Stop::End;
            break;
        }
        out.ids.push(id);
        let piece = stream.push(id)?;
        out.text.push_str(&piece);
        if !piece.is_empty() && listener(&piece).is_break() {
            (out.stop, stopped) = (Stop::Listener, true);
            break;
        }
        if out.ids.len() == spec.max_tokens {
            break;
        }
        if cache.len() == capacity {
            out.stop = Stop::Context;
            break;
        }
        next = inference.next_logits(&mut cache, &[id])?;
    }
    let rest = stream.finish()?;
    out.text.push_str(&rest);
    if !rest.is_empty() && !stopped {
        let _ = listener(&rest);
    }
    Ok(out)
}

/// The next token: the first of the likeliest, or one drawn.
fn choose(logits: &[f32], temperature: f64, draws: &mut Stream) -> usize {
    let mut top = 0;
    for (i, l) in logits.iter().enumerate() {
        if *l > logits[top] || logits[top].is_nan() {
            top = i;
        }
    }
    if temperature == 0.0 {
        return top;
    }
    let largest = f64::from(logits[top]);
    let weight = |l: f32| {
        let w = ((f64::from(l) - largest) / temperature).exp();
        if w.is_finite() { w } else { 0.0 }
    };
    let total: f64 = logits.iter().map(|l| weight(*l)).sum();
    let mut left = draws.unit() * total;
    for (i, l) in logits.iter().enumerate() {
        left -= weight(*l);
        if left < 0.0 {
            return i;
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut draws = Stream::new(0, Purpose::Token, 0);
        assert_eq!(choose(&[0.0, 2.0, 2.0, f32::NAN], 0.0, &mut draws), 1);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let mut draws = Stream::new(5, Purpose::Token, 0);
        let (n, logits) = (20_000, [0.0f32, 1.0, -30.0]);
        let mut counts = [0u32; 3];
        (0..n).for_each(|_| counts[choose(&logits, 0.5, &mut draws)] += 1);
        // exp(2) / (1 + exp(2)), five binomial deviations.
        let p = 2f64.exp() / (1.0 + 2f64.exp());
        let deviation = (p * (1.0 - p) / f64::from(n)).sqrt();
        assert!((f64::from(counts[1]) / f64::from(n) - p).abs() < 5.0 * deviation, "{counts:?}");
        assert_eq!(counts[2], 0);
    }
}
