use super::{
    super::{
        transport::{Options, Transport},
        transport_url::TransportUrl,
    },
    transport,
};

#[test]
fn a_secret_is_never_printed() {
    for (text, shown) in [
        ("smtp://ana:geheim@mx.example:2525", "smtp://***@mx.example:2525"),
        ("smtps://ana:geh%40eim@mx.example", "smtps://***@mx.example"),
        ("https://geheim@api.example/send/geheim?preset=resend", "https://***@api.example"),
        ("https://api.example/?token=geheim&window=24h&apikey=geheim", "https://api.example"),
        ("file:/var/spool", "file:/var/spool"),
    ] {
        let url = TransportUrl::parse(text).unwrap();
        assert_eq!(url.to_string(), shown);
        assert_eq!(format!("{url:?}"), format!("TransportUrl({shown})"));
        if !text.starts_with("file:") {
            let transport = Transport::of(&url, Options::default()).unwrap();
            assert_eq!(transport.name(), shown);
            assert_eq!(format!("{transport:?}"), format!("Transport({shown})"));
        }
    }
}

#[test]
fn a_wrong_url_says_what_is_wrong_and_is_not_repeated() {
    for (text, says) in [
        ("geheim", "not a valid URL"),
        ("ftp://geheim@x/", "is not a transport"),
        ("file:", "needs a directory"),
        ("smtp:///", "needs a host"),
        ("smtp://geheim@mx.example", "no password"),
        ("smtp://mx.example?tls=geheim", "none, opportunistic or required"),
        ("smtps://mx.example?tls=none", "always encrypted"),
        ("smtp://ana:geheim@mx.example?tls=opportunistic", "in clear"),
        ("smtp://mx.example?tsl=none", "no option \"tsl\""),
        ("smtp://mx.example?timeout=geheim", "30s or 24h"),
        ("https://x/?preset=geheim", "resend, brevo or generic"),
        ("https://x/?preset=resend", "needs a token"),
        ("https://geheim@x/?preset=resend&window=48h", "generic only"),
        ("https://geheim@x/?token=geheim", "two tokens"),
        ("https://x/?token=geh%0Aeim", "header cannot have"),
    ] {
        let error = TransportUrl::parse(text).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
        assert!(!error.contains("geheim"), "{text}: {error}");
    }
}

#[test]
fn windows_are_those_that_are_documented() {
    let window = |text| {
        let url = TransportUrl::parse(text).unwrap();
        Transport::of(&url, Options::default()).unwrap().window().map(|window| window.as_secs())
    };
    assert_eq!(window("https://k@api.resend.com?preset=resend"), Some(24 * 3600));
    assert_eq!(window("https://k@api.brevo.com?preset=brevo"), Some(15 * 60));
    assert_eq!(window("https://x/?window=2days"), Some(48 * 3600));
    assert_eq!(window("https://x/"), None);
    assert_eq!(window("smtp://x"), None);
}

#[test]
fn each_account_of_a_service_is_recognised_by_itself() {
    let of = |url: &str| transport(url).recognised_by().to_owned();
    let one = of("https://geheim@mail.example/send?window=1h");
    assert_eq!(one, of("https://mail.example/send?token=geheim&window=2h&timeout=1s"));
    assert!(!one.contains("geheim") && one.starts_with("https://mail.example#"), "{one}");
    for other in [
        "https://another@mail.example/send?window=1h",
        "https://geheim@mail.example/v2/send?window=1h",
        "https://geheim@mail.example/send?window=1h&pool=2",
        "https://geheim@mail.example/send?preset=resend",
        "https://geheim@mail.example:444/send?window=1h",
    ] {
        assert_ne!(of(other), one, "{other}: its keys are others");
    }
}
