-- Lists are pages of one team and one state, forwards or backwards in this order: what is in other states costs nothing.
-- The template is there so that counts need no row.
DROP INDEX sandboxes_team_started;
CREATE INDEX sandboxes_team_state ON sandboxes (team_id, state, started_us DESC, id, template_id);
