//! A very small HTTP server.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// A request: its path with the query, and headers with lower-case names.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// An answer, and how badly it is given.
pub struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    cut: Option<usize>,
    stall: Option<usize>,
    slow: bool,
}

impl Answer {
    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), cut: None, stall: None, slow: false }
    }

    pub fn ok(text: &str) -> Self {
        Self { body: text.into(), ..Self::status(200) }
    }

    pub fn redirect(status: u16, to: &str) -> Self {
        Self::status(status).header("Location", to)
    }

    /// The part of `all` that is asked for.
    pub fn range(request: &Request, all: &[u8]) -> Self {
        let from = request.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        match from {
            None => Self { body: all.to_vec(), ..Self::status(200) },
            Some(from) if from >= all.len() => Self::status(416).header("Content-Range", &format!("bytes */{}", all.len())),
            Some(from) => {
                let range = format!("bytes {from}-{}/{}", all.len() - 1, all.len());
                Self { body: all[from..].to_vec(), ..Self::status(206) }.header("Content-Range", &range)
            }
        }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Closes the connection after so many bytes.
    pub fn cut(mut self, bytes: usize) -> Self {
        self.cut = Some(bytes);
        self
    }

    /// Says nothing more after so many bytes, but stays.
    pub fn stall(mut self, bytes: usize) -> Self {
        self.stall = Some(bytes);
        self
    }

    /// Takes a while.
    pub fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    fn give(&self, stream: &mut TcpStream, stop: &AtomicBool) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Some Reason\r\nContent-Length: {}\r\nConnection: close\r\n", self.status, self.body.len());
        self.headers.iter().for_each(|(n, v)| head.push_str(&format!("{n}: {v}\r\n")));
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        let end = self.cut.or(self.stall).unwrap_or(self.body.len());
        for piece in self.body[..end].chunks(1 << 15) {
            if self.slow {
                thread::sleep(Duration::from_millis(20));
            }
            stream.write_all(piece)?;
        }
        stream.flush()?;
        while self.stall.is_some() && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

type Handler = dyn Fn(&Request) -> Answer + Send + Sync;

/// Listens until dropped.
pub struct Server {
    address: String,
    seen: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (seen, stop): (Arc<Mutex<Vec<Request>>>, Arc<AtomicBool>) = Default::default();
        let handler: Arc<Handler> = Arc::new(handler);
        let (of_thread, stopped) = (seen.clone(), stop.clone());
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let (handler, seen, stopped) = (handler.clone(), of_thread.clone(), stopped.clone());
                thread::spawn(move || {
                    // A client that goes away is part of some tests.
                    let _ = stream.and_then(|s| serve(s, &*handler, &seen, &stopped));
                });
            }
        });
        Self { address, seen, stop, thread: Some(thread) }
    }

    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// What was asked, in order.
    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The listener waits for a connection; this is the last.
        let _ = TcpStream::connect(self.address.trim_start_matches("http://"));
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn serve(mut stream: TcpStream, handler: &Handler, seen: &Mutex<Vec<Request>>, stop: &AtomicBool) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(()) };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = Vec::new();
    for line in lines {
        match line?.split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => break,
        }
    }
    let request = Request { path, headers };
    seen.lock().unwrap().push(request.clone());
    handler(&request).give(&mut stream, stop)
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

pub fn git_blob(text: &str) -> String {
    Sha1::digest(format!("blob {}\0{text}", text.len())).iter().map(|b| format!("{b:02x}")).collect()
}
