//! Row 20: what connections cost on which nothing happens.

use super::{Lab, MODEL, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::client::{Client, Stream, completion};
use crate::engine::Script;
use crate::tls::Secure;

/// Connections of each kind.
const COUNT: usize = 2000;
/// That were there before it was looked how much memory is in use.
const EARLY: usize = 20;

/// Connections that had one answer and are kept, with TLS and without.
pub async fn memory(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let mut setup = lab.setup()?;
    let secure = Secure::listener(&mut setup, "http/1.1")?;
    setup.rule("pool", &pool("tiers = [\"least-connections\"]", &engines))?;
    let gateway = setup.start().await?;
    let wire = completion(MODEL, "one two three", false, 1);
    let (mut plain, mut with_tls) = (Vec::new(), Vec::new());
    for _ in 0..EARLY {
        plain.push(answered(Client::connect(gateway.address).await?, &wire).await?);
        with_tls.push(answered(Client::over(secure.connect().await?), &wire).await?);
    }
    let early = gateway.memory("VmRSS");
    for _ in 0..COUNT {
        plain.push(answered(Client::connect(gateway.address).await?, &wire).await?);
    }
    let amid = gateway.memory("VmRSS");
    for _ in 0..COUNT {
        with_tls.push(answered(Client::over(secure.connect().await?), &wire).await?);
    }
    let late = gateway.memory("VmRSS");
    let each = |bytes: f64| bytes / COUNT as f64 / 1024.0;
    board.most(&format!("memory of each of {COUNT} idle connections"), each(amid - early), "KiB", 20.0);
    board.most(&format!("memory of each of {COUNT} with TLS"), each(late - amid), "KiB", 20.0);
    // they were there all the time
    let mut gone = 0;
    for client in &mut plain {
        gone += u32::from(client.ask(&wire).await.status != 200);
    }
    for client in &mut with_tls {
        gone += u32::from(client.ask(&wire).await.status != 200);
    }
    board.exactly("of them not there any more", gone.into(), 0.0);
    let sent = 2 * (plain.len() + with_tls.len());
    gateway.settle(board, Some(sent as u64)).await;
    Ok(())
}

async fn answered<S: Stream>(mut client: Client<S>, wire: &[u8]) -> Result<Client<S>> {
    match client.ask(wire).await.status {
        200 if client.open => Ok(client),
        status => Err(format!("a request on a connection of its own: {status}").into()),
    }
}
