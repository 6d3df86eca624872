"""Positions of findings on the map: metadata of photographs, camera model, assets, changes,
GeoJSON, CSV and KML.

`findings.py`: each detection from its photograph alone. `survey.py`: assets from all photographs.
`changes.py`: two surveys.

Angles in degrees, lengths in metres, positions on WGS84. Directions are north-east-down (NED)
unless said otherwise.
"""
