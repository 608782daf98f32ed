//! Connections. The server has its own accept loop, because `axum::serve` sets no timeouts. Each
//! phase of a connection has a time limit, and the number of connections is limited.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use inference::{CancelToken, Error, ErrorKind, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use crate::config::Config;
use crate::models::{ModelSource, ServedModel};
use crate::openapi::openapi_json;
use crate::patience::{Patience, Waited};
use crate::routes::router;
use crate::state::App;

/// Maximum size of a request's head, and of data read ahead, in bytes.
const HEAD_BYTES: usize = 64 << 10;
/// The maximum number of headers of a request.
const HEADERS: usize = 100;
/// How long the server waits, after the drain timeout, for cancelled requests to send their last
/// answer.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Polling interval of the token that stops the server.
const TICK: Duration = Duration::from_millis(20);
/// Number of threads that tokenize, load and download.
const BLOCKING_THREADS: usize = 6;

/// A server with its models, bound to its address.
pub struct Server {
    listener: std::net::TcpListener,
    address: SocketAddr,
    app: App,
}

fn io(doing: &str, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{doing}: {e}")).with_source(e)
}

impl Server {
    /// Binds the address and starts the engine's thread. The server serves only the given models.
    /// Connections wait until [`Server::run`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for an invalid configuration or if there are no models;
    /// [`ErrorKind::Io`] if the address is already in use.
    pub fn bind(config: &Config, models: Vec<ServedModel>) -> Result<Self> {
        Self::bind_all(config, models, None)
    }

    /// Binds the address. The server serves the given models, and models that the source loads by
    /// name. A given model may be unloaded only if the source lists it.
    ///
    /// # Errors
    /// Those of [`Server::bind`], except that `models` may be empty.
    pub fn bind_with_source(
        config: &Config,
        models: Vec<ServedModel>,
        source: impl Into<Arc<dyn ModelSource>>,
    ) -> Result<Self> {
        Self::bind_all(config, models, Some(source.into()))
    }

    fn bind_all(
        config: &Config,
        models: Vec<ServedModel>,
        source: Option<Arc<dyn ModelSource>>,
    ) -> Result<Self> {
        config.validate()?;
        let listening = |e| io(&format!("cannot listen on {}", config.address), e);
        let listener = std::net::TcpListener::bind(config.address).map_err(listening)?;
        listener.set_nonblocking(true).map_err(listening)?;
        let address = listener.local_addr().map_err(listening)?;
        let app = App::new(config, models, source, openapi_json())?;
        Ok(Self {
            listener,
            address,
            app,
        })
    }

    /// The address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is set. Then the server refuses new requests, lets running replies
    /// continue for the drain timeout, and cancels the remaining ones. Finally it closes the
    /// models.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the system cannot create threads or event queues.
    pub fn run(self, stop: &CancelToken) -> Result<()> {
        // One thread suffices, because the engine and the tokenizers run on other threads.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()
            .map_err(|e| io("cannot start the server", e))?;
        let app = self.app.clone();
        let served = runtime.block_on(self.serve(stop));
        // Abandoned requests may still be tokenizing. The shutdown waits at most this long for
        // them.
        runtime.shutdown_timeout(LAST_WORDS);
        app.engine.stop(LAST_WORDS);
        for model in app.models.loaded() {
            if let Err(e) = model.model().close() {
                tracing::warn!("closing {}: {e:#}", model.id());
            }
        }
        served
    }

    async fn serve(self, stop: &CancelToken) -> Result<()> {
        let listener = TcpListener::from_std(self.listener).map_err(|e| io("cannot listen", e))?;
        let app = self.app;
        let router = router(&app);
        let connections = Arc::new(Semaphore::new(app.limits.connections));
        let models = Arc::clone(&app.models);
        // The task ends with the runtime.
        tokio::spawn(async move { models.expire().await });
        let graceful = GracefulShutdown::new();
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(app.limits.header_timeout)
            .max_headers(HEADERS)
            .max_buf_size(HEAD_BYTES)
            .keep_alive(true);
        loop {
            let accepted = tokio::select! {
                () = raised(stop) => break,
                accepted = accept(&listener, &connections) => accepted,
            };
            let (stream, permit) = match accepted {
                Ok(accepted) => accepted,
                Err(e) => {
                    // The process may have too many open files, so wait until some connections
                    // close.
                    tracing::warn!("cannot accept a connection: {e}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            // A packet with a single token is small. The system must send it without delay.
            let _ = stream.set_nodelay(true);
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(app.limits.write_timeout));
            let waited = Waited::default();
            let stream = Patience::new(stream, waited.clone(), app.limits.answer_timeout);
            let routes = TowerToHyperService::new(router.clone());
            let service = service_fn(move |request| {
                waited.reset();
                routes.call(request)
            });
            let connection = http.serve_connection(TokioIo::new(stream), service);
            let connection = graceful.watch(connection);
            let metrics = Arc::clone(&app.metrics);
            metrics.connections.inc();
            tokio::spawn(async move {
                if let Err(e) = connection.await {
                    tracing::debug!("a connection ended: {e}");
                }
                metrics.connections.dec();
                drop(permit);
            });
        }
        drop(listener);
        tracing::info!(
            "stopping: {} requests may end within {:?}",
            app.engine.in_flight(),
            app.limits.drain_timeout
        );
        app.engine.drain();
        let mut shutdown = std::pin::pin!(graceful.shutdown());
        let drained = tokio::time::timeout(app.limits.drain_timeout, shutdown.as_mut()).await;
        if drained.is_err() {
            tracing::warn!("cancelling {} requests", app.engine.in_flight());
            app.engine.cancel_all();
            let _ = tokio::time::timeout(LAST_WORDS, shutdown).await;
        }
        Ok(())
    }
}

/// Polls the token, because other threads and signal handlers set it.
async fn raised(stop: &CancelToken) {
    while !stop.is_cancelled() {
        tokio::time::sleep(TICK).await;
    }
}

/// Accepts the next connection, after waiting until the number of connections is below the limit.
async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await;
    // The semaphore is never closed, so this never fails.
    let permit = permit.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .finish()
    }
}
