//! The nouns: clients, proposals, their states and what changes them.

use semel::{Error, Timestamp};
use semel_store::from_row;
use serde::{Serialize, Serializer};

use super::valor::Valor;

/// A client, as it is answered.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cliente {
    pub(super) id: i64,
    pub(super) nome: String,
    pub(super) email: String,
    pub(super) documento: Option<String>,
    pub(super) idempotencia_key: Option<String>,
    #[serde(serialize_with = "time")]
    pub(super) criado_em: i64,
}

from_row!(Cliente { id, nome, email, documento, idempotencia_key, criado_em });

/// A proposal, as it is answered.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Proposta {
    pub(super) id: i64,
    pub(super) cliente_id: i64,
    pub(super) valor: Valor,
    pub(super) estado: Estado,
    pub(super) versao: i64,
    pub(super) idempotencia_key: Option<String>,
    #[serde(serialize_with = "time")]
    pub(super) criado_em: i64,
}

from_row!(Proposta, row => {
    id,
    cliente_id,
    valor: Valor::from(row.try_get::<i64, _>("valor_centavos")?),
    estado: Estado::try_from(row.try_get::<String, _>("estado")?).map_err(|e| sqlx::Error::Decode(e.into()))?,
    versao,
    idempotencia_key,
    criado_em,
});

/// One change of a proposal.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Mudanca {
    /// Nothing for the first, which made it.
    pub(super) de: Option<String>,
    pub(super) para: String,
    pub(super) versao: i64,
    pub(super) usuario: Option<String>,
    #[serde(serialize_with = "time")]
    pub(super) quando: i64,
}

from_row!(Mudanca { de, para, versao, usuario, quando });

/// What has an id to go on from in a list.
pub(super) trait Listed {
    /// Where the next page begins.
    fn place(&self) -> i64;
}

impl Listed for Cliente {
    fn place(&self) -> i64 {
        self.id
    }
}

impl Listed for Proposta {
    fn place(&self) -> i64 {
        self.id
    }
}

impl Listed for Mudanca {
    fn place(&self) -> i64 {
        self.versao
    }
}

/// Where a proposal stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Estado {
    /// Made, and not sent yet.
    Rascunho,
    /// Submitted to the client.
    Enviada,
    /// Accepted.
    Aceita,
    /// Refused.
    Recusada,
    /// Withdrawn.
    Cancelada,
}

impl Estado {
    const ALL: [Self; 5] = [Self::Rascunho, Self::Enviada, Self::Aceita, Self::Recusada, Self::Cancelada];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rascunho => "rascunho",
            Self::Enviada => "enviada",
            Self::Aceita => "aceita",
            Self::Recusada => "recusada",
            Self::Cancelada => "cancelada",
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|estado| estado.name() == name)
    }
}

impl TryFrom<String> for Estado {
    type Error = Error;

    fn try_from(name: String) -> Result<Self, Error> {
        Self::parse(&name).ok_or(Error::Corrupt("a proposal has an unknown estado"))
    }
}

impl From<i64> for Valor {
    fn from(cents: i64) -> Self {
        Self::from_cents(cents)
    }
}

/// What can be done with a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acao {
    Submeter,
    Aceitar,
    Recusar,
    Cancelar,
}

impl Acao {
    /// The `tipo_operacao`, which is also the kind in the ledger's scope.
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::Submeter => "submeter_proposta",
            Self::Aceitar => "aceitar_proposta",
            Self::Recusar => "recusar_proposta",
            Self::Cancelar => "cancelar_proposta",
        }
    }

    /// Where it leads from a state, if it may be done there.
    pub(super) const fn from(self, estado: Estado) -> Option<Estado> {
        match (self, estado) {
            (Self::Submeter, Estado::Rascunho) => Some(Estado::Enviada),
            (Self::Aceitar, Estado::Enviada) => Some(Estado::Aceita),
            (Self::Recusar, Estado::Enviada) => Some(Estado::Recusada),
            (Self::Cancelar, Estado::Rascunho | Estado::Enviada) => Some(Estado::Cancelada),
            _ => None,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn time<S: Serializer>(micros: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&Timestamp::from_micros(*micros))
}
