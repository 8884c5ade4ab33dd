//! A proxy between a client and any server, which can be cut, or blocked in one direction.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot lay its wire fails")]

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use super::proxy::host_of;

/// The directions that a wire passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Everything.
    Open,
    /// Requests, but no answers: those wait.
    Deaf,
    /// Answers, but no requests: those wait, until the buffers are full.
    Mute,
    /// Nothing: existing and new connections are cut.
    Away,
}

/// A wire in front of a server. Connections end with it.
pub struct Wire {
    address: SocketAddr,
    /// The flow, and how often all connections were cut.
    flow: watch::Sender<(Flow, u64)>,
    /// Its target.
    target: Arc<Mutex<String>>,
    listening: tokio::task::JoinHandle<()>,
}

impl Wire {
    /// A wire to the server of a URL.
    pub async fn to(url: &str) -> Self {
        let target = Arc::new(Mutex::new(host_of(url).to_owned()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let flow = watch::Sender::new((Flow::Open, 0));
        let (used, leads_to) = (flow.clone(), target.clone());
        let listening = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (flow, target) = (used.subscribe(), leads_to.lock().unwrap().clone());
                // However it ends, both sides are closed.
                tokio::spawn(async move { drop(forward(client, &target, flow).await) });
            }
        });
        Self { address, flow, target, listening }
    }

    /// The same URL, through the wire.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        url.replacen(host_of(url), &self.address.to_string(), 1)
    }

    /// Sets the flow.
    pub fn set(&self, to: Flow) {
        self.flow.send_modify(|(flow, _)| *flow = to);
    }

    /// Connects to the server of another URL from now on; cuts all connections.
    pub fn lead_to(&self, url: &str) {
        host_of(url).clone_into(&mut self.target.lock().unwrap());
        self.cut();
    }

    /// Cuts all existing connections. New ones pass.
    pub fn cut(&self) {
        self.flow.send_modify(|(_, cuts)| *cuts += 1);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.listening.abort();
        self.set(Flow::Away);
    }
}

async fn forward(mut client: TcpStream, target: &str, mut flow: watch::Receiver<(Flow, u64)>) -> io::Result<()> {
    let (mut is, cuts) = *flow.borrow_and_update();
    if is == Flow::Away {
        return Ok(());
    }
    let mut server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut said, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            read = client.read(&mut said), if is != Flow::Mute => match read? {
                0 => return server.shutdown().await,
                read => server.write_all(&said[..read]).await?,
            },
            read = server.read(&mut answered), if is != Flow::Deaf => match read? {
                0 => return client.shutdown().await,
                read => client.write_all(&answered[..read]).await?,
            },
            changed = flow.changed() => {
                let now = *flow.borrow_and_update();
                if changed.is_err() || now.0 == Flow::Away || now.1 != cuts {
                    return Ok(());
                }
                is = now.0;
            }
        }
    }
}
