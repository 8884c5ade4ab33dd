//! A wire to PostgreSQL that can be cut.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use sqlx::postgres::PgConnectOptions;

use crate::place::server;

/// Forwards connections to the test's PostgreSQL. Its thread ends with the process.
pub(crate) struct Wire {
    port: u16,
    ends: Arc<Mutex<Ends>>,
}

#[derive(Default)]
struct Ends {
    cut: bool,
    /// Whether a client tried to connect while it was cut.
    tried: bool,
    open: Vec<TcpStream>,
}

impl Wire {
    pub(crate) fn to_postgres() -> Self {
        let options: PgConnectOptions = server().parse().unwrap();
        let (host, port) = (options.get_host().to_owned(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let wire = Self { port: listener.local_addr().unwrap().port(), ends: Arc::default() };
        let ends = Arc::clone(&wire.ends);
        thread::spawn(move || {
            for near in listener.incoming() {
                let (near, mut ends) = (near.unwrap(), ends.lock().unwrap());
                ends.tried |= ends.cut;
                if !ends.cut {
                    let far = TcpStream::connect((host.as_str(), port)).unwrap();
                    pass_on(&near, &far);
                    pass_on(&far, &near);
                    ends.open.extend([near, far]);
                }
            }
        });
        wire
    }

    /// The URL of a ledger through this wire.
    pub(crate) fn url(&self, direct: &str) -> String {
        let mut url = url::Url::parse(direct).unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(self.port)).unwrap();
        url.into()
    }

    /// Ends all connections, and every new one.
    pub(crate) fn cut(&mut self) {
        let mut ends = self.ends.lock().unwrap();
        ends.cut = true;
        for end in ends.open.drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    /// Whether a client tried to connect while it was cut.
    pub(crate) fn was_tried(&self) -> bool {
        self.ends.lock().unwrap().tried
    }

    /// Lets new connections through again.
    pub(crate) fn mend(&mut self) {
        self.ends.lock().unwrap().cut = false;
    }
}

fn pass_on(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
}
