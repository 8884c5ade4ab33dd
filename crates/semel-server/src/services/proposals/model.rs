//! The nouns: clients, proposals, their states and actions.

use semel::Error;
use semel_store::from_row;
use serde::Serialize;

use super::valor::Valor;
use crate::http::answers::time;

/// A client in an answer.
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

/// A proposal in an answer.
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
    /// `None` for the creation.
    pub(super) de: Option<String>,
    pub(super) para: String,
    pub(super) versao: i64,
    pub(super) usuario: Option<String>,
    #[serde(serialize_with = "time")]
    pub(super) quando: i64,
}

from_row!(Mudanca { de, para, versao, usuario, quando });

/// An item of a list, with an id for the cursor.
pub(super) trait Listed {
    /// The cursor after this item.
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

/// The state of a proposal.
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

/// The actions on a proposal.
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

    /// The state that it leads to, if it is allowed in this state.
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
