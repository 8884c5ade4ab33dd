-- Checksum of the first text: 49c6fab5bf1a8b89ad0eda912039d72e624022328396bc77c1a5fe52453c6140e5a901c0dd923e69065cb07324957915
-- Its statements: 84297ff7d150eda0

-- Clients, proposals and their history. Times are microseconds since 1970 by the database's clock, amounts are whole
-- cents. The tenant is in every key: tenants share no row. Differs from PostgreSQL's in type names, in the clock
-- (milliseconds) and in the type of JSON.

CREATE TABLE clientes (
    id               INTEGER PRIMARY KEY,
    tenant           TEXT NOT NULL,
    nome             VARCHAR(255) NOT NULL,
    email            VARCHAR(255) NOT NULL,
    email_minusculo  TEXT NOT NULL,             -- Ana@x.com and ana@x.com are one address
    documento        VARCHAR(20),
    idempotencia_key VARCHAR(255),
    criado_em        INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    CONSTRAINT clientes_tenant_id UNIQUE (tenant, id),
    CONSTRAINT clientes_email UNIQUE (tenant, email_minusculo),
    CONSTRAINT clientes_idempotencia_key UNIQUE (tenant, idempotencia_key),
    CONSTRAINT a_cliente_has_a_nome CHECK (length(nome) BETWEEN 1 AND 255),
    CONSTRAINT a_key_has_1_to_255_characters CHECK (length(idempotencia_key) BETWEEN 1 AND 255)
);

CREATE TABLE propostas (
    id               INTEGER PRIMARY KEY,
    tenant           TEXT NOT NULL,
    cliente_id       INTEGER NOT NULL,
    valor_centavos   INTEGER NOT NULL,
    estado           TEXT NOT NULL,
    versao           INTEGER NOT NULL,
    idempotencia_key VARCHAR(255),
    criado_em        INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    CONSTRAINT propostas_tenant_id UNIQUE (tenant, id),
    CONSTRAINT propostas_idempotencia_key UNIQUE (tenant, idempotencia_key),
    CONSTRAINT propostas_cliente FOREIGN KEY (tenant, cliente_id) REFERENCES clientes (tenant, id),
    CONSTRAINT valor_is_decimal_10_2 CHECK (valor_centavos BETWEEN 1 AND 9999999999),
    CONSTRAINT a_known_estado CHECK (estado IN ('rascunho', 'enviada', 'aceita', 'recusada', 'cancelada')),
    CONSTRAINT a_rascunho_is_new CHECK ((estado = 'rascunho') = (versao = 1)),
    CONSTRAINT a_key_has_1_to_255_characters CHECK (length(idempotencia_key) BETWEEN 1 AND 255)
);
CREATE INDEX propostas_by_cliente ON propostas (tenant, cliente_id, id);
CREATE INDEX propostas_by_estado ON propostas (tenant, estado, id);

-- Every change of a proposal; the first one is its creation.
CREATE TABLE historico (
    tenant      TEXT NOT NULL,
    proposta_id INTEGER NOT NULL,
    versao      INTEGER NOT NULL,
    de          TEXT,
    para        TEXT NOT NULL,
    usuario     TEXT,
    quando      INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    PRIMARY KEY (tenant, proposta_id, versao),
    CONSTRAINT historico_proposta FOREIGN KEY (tenant, proposta_id) REFERENCES propostas (tenant, id),
    CONSTRAINT only_the_first_comes_from_nothing CHECK ((de IS NULL) = (versao = 1))
);

-- Results of changes to existing rows that were made with an idempotency key, as they were then.
CREATE TABLE idempotencia_operacoes (
    id               INTEGER PRIMARY KEY,
    tenant           TEXT NOT NULL,
    idempotencia_key VARCHAR(255) NOT NULL,
    tipo_operacao    VARCHAR(50) NOT NULL,
    entidade_id      INTEGER NOT NULL,
    resultado        TEXT NOT NULL CHECK (json_valid(resultado)),
    created_at       INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000),
    CONSTRAINT idempotencia_operacoes_key UNIQUE (tenant, idempotencia_key, tipo_operacao)
);
-- For the clean-up.
CREATE INDEX idempotencia_operacoes_created_at ON idempotencia_operacoes (created_at);
