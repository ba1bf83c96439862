# fish completion for vllmctl(1). Names are asked of the running supervisor; where it does not run there are none.

function __vllmctl_names
    vllmctl list --names --timeout 2 2>/dev/null
end

set -l commands status list watch logs doctor up down sleep wake restart drain pull reload config bench route
set -l operations up down sleep wake restart drain

complete -c vllmctl -f
complete -c vllmctl -l json -d 'Answer in JSON'
complete -c vllmctl -s q -l quiet -d 'Only errors'
complete -c vllmctl -l no-color -d 'No colours'
complete -c vllmctl -l timeout -x -d 'Stop waiting for the daemon then (seconds)'
complete -c vllmctl -l system -d "The system's daemon and not the user's"
complete -c vllmctl -s h -l help -d 'Show help'

complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -l version -d 'Print the version'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a status -d 'Show all models and replicas, or some in detail'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a list -d 'List the models'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a watch -d 'Show changes as they happen'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a logs -d 'Show the logs of replicas, or of everything'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a doctor -d 'Check this machine and the installation'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a up -d 'Start replicas, and end a hold'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a down -d 'Stop replicas and hold them'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a sleep -d 'Put replicas to sleep'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a wake -d 'Wake sleeping replicas'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a restart -d 'Restart the units'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a drain -d 'Give replicas no new requests'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a pull -d 'Fetch what replicas will need'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a reload -d 'Have the daemon read its configuration again'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a config -d 'Look at the configuration on disk'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a bench -d "Measure this machine's own replicas"

complete -c vllmctl -n "__fish_seen_subcommand_from status logs pull $operations" -a '(__vllmctl_names)'
complete -c vllmctl -n "__fish_seen_subcommand_from pull $operations" -l all -d 'Every model'
complete -c vllmctl -n '__fish_seen_subcommand_from sleep' -s l -l level -x -a '1 2' -d 'Sleep level'
complete -c vllmctl -n '__fish_seen_subcommand_from list' -l names -d 'Only names'
complete -c vllmctl -n '__fish_seen_subcommand_from logs' -s f -l follow -d 'Go on with new lines'
complete -c vllmctl -n '__fish_seen_subcommand_from logs' -s n -l lines -x -a 'all 20 100 1000' -d 'How many lines'
complete -c vllmctl -n '__fish_seen_subcommand_from logs doctor pull config' -l config -r -d 'Main configuration file'
complete -c vllmctl -n '__fish_seen_subcommand_from config; and not __fish_seen_subcommand_from check show schema path' -a 'check show schema path'
complete -c vllmctl -n "not __fish_seen_subcommand_from $commands" -a route -d 'See where requests go'
complete -c vllmctl -n '__fish_seen_subcommand_from route; and not __fish_seen_subcommand_from explain' -a explain
complete -c vllmctl -n '__fish_seen_subcommand_from explain' -a '(__vllmctl_names)'
complete -c vllmctl -n '__fish_seen_subcommand_from explain' -F
complete -c vllmctl -n '__fish_seen_subcommand_from explain' -l path -x -d 'Where it would be sent'
complete -c vllmctl -n '__fish_seen_subcommand_from bench; and not __fish_seen_subcommand_from routing' -a routing
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -a '(__vllmctl_names)'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l policies -x -a 'prefill adaptive roundrobin affinity' -d 'Which policies'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l tokens -x -d 'Tokens of a text'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l burst -x -d 'Requests of the burst'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l conversations -x -d 'Conversations at a time'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l turns -x -d 'Turns of each'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l output -x -d 'Tokens of each answer'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l rounds -x -d 'How often everything is done'
complete -c vllmctl -n '__fish_seen_subcommand_from routing' -l url -x -d 'The public port'
