use proptest::prelude::*;
use serde_json::json;
use zofo_hal::{DType, ErrorKind, Result};
use zofo_ops::files::{Checkpoint, MappedBytes};

use crate::support::{raw, refused, tensors, tiny_tensors, value};

fn parse(bytes: Vec<u8>) -> Result<Checkpoint> {
    Checkpoint::from_bytes("w.safetensors", MappedBytes::from(bytes))
}

/// Reads everything that a checkpoint offers.
fn touch(checkpoint: &Checkpoint) {
    for name in checkpoint.names() {
        if let Ok(view) = checkpoint.tensor(name) {
            assert_eq!(view.shape.iter().product::<usize>(), view.elements());
            assert_eq!(view.to_f32().len(), view.elements());
        }
    }
}

#[test]
fn single_file_is_mapped_and_outlives_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), tensors(&tiny_tensors())).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let name = "model.layers.1.mlp.down_proj.weight";
    let view = checkpoint.tensor(name).unwrap();
    drop((checkpoint, folder));
    assert_eq!((view.dtype, view.shape.as_slice()), (DType::F32, [12, 10].as_slice()));
    let expected: Vec<f32> = (0..120).map(|i| value(name, i)).collect();
    assert_eq!(view.to_f32(), expected);
    assert_eq!(view.bytes.cast::<f32>(), Some(expected.as_slice()));
}

#[test]
fn unaligned_tensors_are_read_without_a_cast() {
    // A header one byte longer moves every tensor to an odd address of the file.
    let aligned = tensors(&[("a".into(), vec![3])]);
    let header = std::str::from_utf8(&aligned[8..aligned.len() - 12]).unwrap();
    let mut odd = raw(&format!("{header} "), 0);
    odd.extend(&aligned[aligned.len() - 12..]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.safetensors");
    std::fs::write(&path, odd).unwrap();
    let view = Checkpoint::open(&path).unwrap().tensor("a").unwrap();
    assert_eq!(view.bytes.cast::<f32>(), None, "a map starts at a page, so this tensor cannot be aligned");
    assert_eq!(view.to_f32(), [value("a", 0), value("a", 1), value("a", 2)]);
}

#[test]
fn half_types_widen_exactly() {
    let mut file =
        raw(r#"{"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}"#, 0);
    file.extend([0x00, 0x3c, 0x00, 0xc0, 0x80, 0x3f, 0x00, 0xc0]);
    let checkpoint = parse(file).unwrap();
    assert_eq!(checkpoint.tensor("h").unwrap().to_f32(), [1.0, -2.0]);
    assert_eq!(checkpoint.tensor("b").unwrap().to_f32(), [1.0, -2.0]);
    assert_eq!(checkpoint.tensor("b").unwrap().dtype, DType::Bf16);
}

#[test]
fn other_types_are_refused_by_name_when_asked_for() {
    let checkpoint = parse(raw(r#"{"i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#, 8)).unwrap();
    refused(checkpoint.tensor("i"), ErrorKind::Unsupported, &["w.safetensors", "`i`", "I64", "BF16"]);
    refused(checkpoint.tensor("j"), ErrorKind::Format, &["w.safetensors", "no tensor `j`"]);
}

#[test]
fn empty_tensors_are_fine() {
    let view = parse(raw(r#"{"e":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]}}"#, 0)).unwrap().tensor("e").unwrap();
    assert!(view.to_f32().is_empty() && view.bytes.is_empty());
}

#[test]
fn hostile_headers() {
    let huge = u64::MAX.to_le_bytes().to_vec();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "too short"),
        (vec![1, 2, 3], "too short"),
        (huge, "not a safetensors file"),
        (100u64.to_le_bytes().to_vec(), "truncated"),
        (raw("{", 0), "malformed"),
        (raw("[]", 0), "malformed"),
        (raw("{}", 4), "appended"),
        (raw(&"[".repeat(100_000), 0), "malformed"),
        (raw(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 7), "truncated"),
        (raw(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 9), "appended"),
        (raw(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, 8), "malformed"),
        (raw(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8), "malformed"),
        (raw(r#"{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}"#, 8), "malformed"),
        (raw(r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, 8), "malformed"),
        // Overlapping tensors, and a hole between two.
        (
            raw(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#, 12),
            "malformed",
        ),
        (
            raw(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#, 12),
            "malformed",
        ),
        // Shapes whose product overflows.
        (raw(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0), "malformed"),
    ];
    for (bytes, part) in cases {
        refused(parse(bytes), ErrorKind::Format, &["w.safetensors", part, "fetch or convert"]);
    }
}

#[test]
fn offsets_that_overflow_when_added_to_the_header_are_refused() {
    // Nine tensors of almost 2^61 bytes each, consistent among themselves, end at almost 2^64.
    let size = (1u64 << 61) - 1;
    let mut entries: Vec<String> =
        (0..8).map(|i| format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{},{}]}}"#, i * size, (i + 1) * size)).collect();
    entries.push(format!(r#""u":{{"dtype":"U8","shape":[7],"data_offsets":[{},{}]}}"#, 8 * size, 8 * size + 7));
    refused(parse(raw(&format!("{{{}}}", entries.join(",")), 16)), ErrorKind::Format, &["truncated"]);
}

#[test]
fn every_truncation_is_refused() {
    let whole = tensors(&tiny_tensors()[..5]);
    for length in 0..whole.len() {
        refused(parse(whole[..length].to_vec()), ErrorKind::Format, &["w.safetensors"]);
    }
    touch(&parse(whole).unwrap());
}

#[test]
fn every_changed_header_byte_is_survived() {
    let whole = tensors(&tiny_tensors()[..3]);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in 0..header {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            if let Ok(checkpoint) = parse(bytes) {
                touch(&checkpoint);
            }
        }
    }
}

proptest! {
    #[test]
    fn random_changes_are_survived(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<prop::sample::Index>()) {
        let mut bytes = tensors(&tiny_tensors()[..4]);
        for (at, byte) in changes {
            let n = bytes.len();
            bytes[at.index(n)] = byte;
        }
        let cut = bytes[..cut.index(bytes.len())].to_vec();
        for b in [bytes, cut] {
            if let Ok(checkpoint) = parse(b) {
                touch(&checkpoint);
            }
        }
    }
}

fn sharded(weight_map: serde_json::Value) -> (tempfile::TempDir, Result<Checkpoint>) {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("model");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(folder.path().join("outside.safetensors"), tensors(&[("a".into(), vec![2])])).unwrap();
    std::fs::write(inner.join("s1.safetensors"), tensors(&[("a".into(), vec![2])])).unwrap();
    std::fs::write(inner.join("s2.safetensors"), tensors(&[("b".into(), vec![3]), ("c".into(), vec![1])])).unwrap();
    std::fs::write(inner.join("model.safetensors.index.json"), json!({"metadata": {}, "weight_map": weight_map}).to_string()).unwrap();
    let opened = Checkpoint::open(&inner);
    (folder, opened)
}

#[test]
fn shards_are_found_through_the_index() {
    let (_folder, checkpoint) = sharded(json!({"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"}));
    let checkpoint = checkpoint.unwrap();
    assert_eq!(checkpoint.tensor("c").unwrap().to_f32(), [value("c", 0)]);
    assert_eq!(checkpoint.tensor("a").unwrap().shape, [2]);
    let mut names: Vec<_> = checkpoint.names().collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "c"]);
}

#[test]
fn an_index_that_points_elsewhere_is_refused() {
    for name in [
        "../outside.safetensors",
        "/outside.safetensors",
        "..",
        "",
        "x/../s1.safetensors",
        "./s1.safetensors",
        "..\\outside.safetensors",
        "c:s1.safetensors",
        "config.json",
        "s1.safetensors/",
    ] {
        refused(sharded(json!({"a": name})).1, ErrorKind::Format, &["index.json", "plain name"]);
    }
}

#[test]
fn wrong_indices_are_refused() {
    refused(sharded(json!({"a": "s9.safetensors"})).1, ErrorKind::Io, &["s9.safetensors"]);
    refused(sharded(json!({"b": "s1.safetensors"})).1, ErrorKind::Format, &["`b`", "s1.safetensors", "different checkpoints"]);
    refused(sharded(json!({"a": 3})).1, ErrorKind::Format, &["`a`", "name of a file"]);
    refused(sharded(json!({})).1, ErrorKind::Format, &["weight_map", "empty"]);
    refused(sharded(json!(null)).1, ErrorKind::Format, &["weight_map", "missing"]);
}

#[test]
fn a_folder_without_weights_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    refused(Checkpoint::open(folder.path()), ErrorKind::Io, &["model.safetensors", "Hugging Face"]);
    std::fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    refused(Checkpoint::open(folder.path()), ErrorKind::Io, &["pickled", "safe_serialization"]);
    refused(Checkpoint::open(&folder.path().join("none.safetensors")), ErrorKind::Io, &["none.safetensors"]);
}

#[test]
fn bytes_share_their_owner() {
    let bytes = MappedBytes::from(vec![1u8, 2, 3, 4]);
    let middle = bytes.slice(1..3).unwrap();
    assert_eq!(middle.as_ref(), [2, 3]);
    assert_eq!(middle.slice(1..2).unwrap().as_ref(), [3]);
    assert!(middle.slice(1..3).is_none() && bytes.slice(0..5).is_none());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = bytes.slice(3..2);
    assert!(reversed.is_none());
    fn shared<T: AsRef<[u8]> + Clone + Send + Sync + 'static>(_: T) {}
    shared(middle);
}
